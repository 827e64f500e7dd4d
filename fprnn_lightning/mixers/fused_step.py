"""One iteration of the fixed-point mixer as one matrix product and one kernel, for FP-RNN's core with reflections.

    f(y) = core( w + (I - Q)(y - w) ),    terms = raw + (V y_{t-1}) / rms(y_{t-1})

The product V y has no normalised state to wait for, as the kernel divides by the rms, which it takes of y as it reads
it. Both share a few buffers over a solve: f(y) is written over the iterate before y. No gradient goes through this.
"""

from importlib import import_module

import torch
from torch import Tensor

from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.channel_mixers.low_rank import LowRank
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.mixers.recurrent import RecurrentMixer, TermProjection
from fprnn_lightning.scan import resolve_backend
from fprnn_lightning.scan.backends import is_traced
from fprnn_lightning.scan.rows import rows
from fprnn_lightning.solvers import Solver
from fprnn_lightning.solvers.items import Items
from fprnn_lightning.solvers.picard import Picard

IS_PRODUCT = {Householder: True, LowRank: False}  # or a sum of the reflections; other mixers have no kernel
MOST_CHANNELS = {"cpu": 2**31, "triton": 1024}  # a token of the Triton kernel is one block
LINE = 64  # bytes; a product whose rows begin within lines takes up to a third longer


class FusedStep:
    """The function f of one solve, and how far its last value is from what it was a function of.

    Args:
        backend: "cpu" or "triton".
        terms: what reads the iterate.
        rank: directions R.
        product: whether Q is the product of the reflections, or the identity less their sum.
        normalise: whether terms read y brought to unit root mean square, or y itself.
        x: input of the core (B, T, D).
        raw: terms of the input (B, T, K), as [decay D | directions R D | strengths R | input D].
        initial: the iterate that is 0 and needs no product, (B, T, D).
        items: what of y is judged together.
    """

    def __init__(
        self,
        backend: str,
        terms: TermProjection,
        rank: int,
        product: bool,
        normalise: bool,
        x: Tensor,
        raw: Tensor,
        initial: Tensor,
        items: Items,
    ) -> None:
        self._iterate = import_module(f"{__package__}.fused_step_{backend}_kernels").iterate
        self._options = rank, product, normalise
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
        """What each of the terms reads of y, V y: (B, T, size of the term), None for nothing."""
        if self._weight is None or y is self._initial:
            return [None] * len(self._parts)
        torch.mm(y.flatten(0, 1).to(self._weight.dtype), self._weight.T, out=self._product.flatten(0, 1))
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
    product = IS_PRODUCT.get(type(mixer.channel_mixer))
    backend = resolve_backend(x)
    if (
        product is None
        or mixer.channel_mixer.largest != 1
        or type(mixer.core) is not GatedDiagonal
        or type(solver) is not Picard  # another may keep iterates, which are written over here
        or x.shape[-1] > MOST_CHANNELS.get(backend, 0)
        or is_traced(x)
    ):
        return None
    options = mixer.channel_mixer.rank, product, mixer.dependence.normalise
    return FusedStep(backend, mixer.terms, *options, x, raw, initial, items)


def _product_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which autocast, where it is on, has matrices of weights like this one multiplied."""
    device = weight.device.type
    lower = torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    return torch.get_autocast_dtype(device) if lower else weight.dtype
