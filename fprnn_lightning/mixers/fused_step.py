"""One iteration of the fixed-point mixer as one matrix product and one kernel, for a core with reflections.

    f(y) = core( w + (I - Q)(y - w) ),    terms = raw + (V s_{t-1}) / rms(s_{t-1}),    s what is seen of y

The product V s has no normalised state to wait for, as the kernel divides by the rms, which it takes of s as it reads
y. Both share a few buffers over a solve: f(y) is written over the iterate before y. No gradient goes through this.
"""

from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.channel_mixers.low_rank import LowRank
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.mixers.fused_selective_step import FusedSelectiveSSM
from fprnn_lightning.mixers.recurrent import RecurrentMixer
from fprnn_lightning.scan import resolve_backend
from fprnn_lightning.scan.backends import is_traced
from fprnn_lightning.scan.context_parallel import slices_in_use
from fprnn_lightning.scan.rows import rows
from fprnn_lightning.solvers import Solver
from fprnn_lightning.solvers.items import Items
from fprnn_lightning.solvers.picard import Picard

IS_PRODUCT = {Householder: True, LowRank: False}  # or a sum of the reflections; other mixers have no kernel
LINE = 64  # bytes; a product whose rows begin within lines takes up to a third longer


class FusedGatedDiagonal:
    """FP-RNN's core in one solve.

    Args:
        core: the core.
        x: its input (B, T, D).
    """

    kernels: ClassVar[str] = "fused_step"
    """What the files with its kernels begin with, before the backend's name."""
    most_channels: ClassVar[dict[str, int]] = {"cpu": 2**31, "triton": 1024}  # a token is one block of Triton's
    """The most channels D that each backend's kernel takes."""

    def __init__(self, core: GatedDiagonal, x: Tensor) -> None:
        self.arguments = ()
        """What its kernel takes besides what all kernels take."""

    def seen(self, y: Tensor) -> Tensor:
        """What is seen of an iterate (B, T, D), until the next call."""
        return y


FUSED_CORES = {GatedDiagonal: FusedGatedDiagonal, SelectiveSSM: FusedSelectiveSSM}


class FusedStep:
    """The function f of one solve, and how far its last value is from what it was a function of.

    Args:
        backend: "cpu" or "triton".
        mixer: the mixer, of a core and a channel mixer that have a kernel.
        x: input of the core (B, T, D).
        raw: terms of the input (B, T, K), as [decay | directions R D | strengths R | input | output].
        initial: the iterate that is 0, (B, T, D).
        items: what of y is judged together.
    """

    def __init__(
        self, backend: str, mixer: RecurrentMixer, x: Tensor, raw: Tensor, initial: Tensor, items: Items
    ) -> None:
        terms, q = mixer.terms, mixer.channel_mixer
        self._core = FUSED_CORES[type(mixer.core)](mixer.core, x)
        self._iterate = import_module(f"{__package__}.{self._core.kernels}_{backend}_kernels").iterate
        self._options = q.rank, IS_PRODUCT[type(q)], mixer.dependence.normalise, *self._core.arguments
        self._x, self._raw, self._initial, self._items = rows(x), rows(raw), initial, items
        self._iterates = x.new_empty(x.shape), x.new_empty(x.shape)
        self._change, self._size = x.new_zeros(x.shape[:2]), x.new_zeros(x.shape[:2])
        self._weight = None
        self._parts: list[Tensor | None] = [None] * len(terms.sizes)
        if terms.reads_feedback:
            weight = terms.read_weight().detach()
            self._weight = weight.to(_product_dtype(weight))
            channels, line = len(weight), LINE // self._weight.element_size()
            self._product = self._weight.new_empty(*x.shape[:2], -(-channels // line) * line)[..., :channels]
            sizes = zip(terms.sizes, terms.dependent, strict=True)
            parts = iter(self._product.split([size for size, reads in sizes if reads], -1))
            self._parts = [next(parts) if reads else None for reads in terms.dependent]

    def __call__(self, y: Tensor) -> Tensor:
        """f(y), which stays what it is until the call after the next."""
        return self.advance(y, self.read(y))

    def read(self, y: Tensor) -> list[Tensor | None]:
        """What each of the terms reads of y, V s: (B, T, size of the term), None for nothing."""
        if self._weight is None:
            return self._parts
        s = self._core.seen(y)
        if s is self._initial:
            return [None] * len(self._parts)
        torch.mm(s.flatten(0, 1).to(self._weight.dtype), self._weight.T, out=self._product.flatten(0, 1))
        return self._parts

    def advance(self, y: Tensor, read: list[Tensor | None]) -> Tensor:
        """f(y), given what the terms read of y."""
        y = y.contiguous()
        f_y = self._iterates[y.data_ptr() == self._iterates[0].data_ptr()]
        self._iterate(*self._options, self._raw, *read, self._x, y, f_y, self._change, self._size)
        return f_y

    def measure(self, y: Tensor, f_y: Tensor) -> Tensor:
        """The relative change of each item in the last call, from y to f(y); 0 before the first."""
        return self._items.change_of_tokens(self._change, self._size)


def fused_step(
    mixer: RecurrentMixer, solver: Solver, x: Tensor, raw: Tensor, initial: Tensor, items: Items
) -> FusedStep | None:
    """The fused f of a mixer's solve without gradient from `initial` = 0, if there is one; see `FusedStep`."""
    core, backend = FUSED_CORES.get(type(mixer.core)), resolve_backend(x)
    if (
        core is None
        or type(mixer.channel_mixer) not in IS_PRODUCT
        or mixer.channel_mixer.largest != 1
        or type(solver) is not Picard  # another may keep iterates, which are written over here
        or x.shape[-1] > core.most_channels.get(backend, 0)
        or is_traced(x)
        or slices_in_use() is not None  # whose scan has to be told where it starts
    ):
        return None
    return FusedStep(backend, mixer, x, raw, initial, items)


def _product_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which autocast, where it is on, has matrices of weights like this one multiplied."""
    device = weight.device.type
    lower = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(device) if lower else weight.dtype
