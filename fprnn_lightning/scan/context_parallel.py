"""Sequences cut in time over the ranks of a process group: slice after slice, rank r holds the r-th.

A scan is linear in the state s_r that comes into slice r, so all that a slice tells of itself is the product P_r of its
decays and its last state L_r from a state of zero (from the initial state in the first slice):

    s_{r+1} = P_r s_r + L_r            going forward, with s_1 = L_0
    g_{r-1} = M_r + P_r* g_r           and back, with g_{last} = 0 (* conjugates)

with g_r the gradient to the last state of slice r that comes from later slices, M_r the gradient to s_r from slice r
alone. So each direction of a scan is a pass over the slice, one all-gather, and a pass from the true state:

    forward     2 states of each rank: P_r and L_r (Mamba's scans: L_r and the sum of dt, as P_r = exp(A sum_t dt_t))
    backward    1 state of each rank: M_r, as the products are kept

The first slice needs no second pass and the last one no first, so two ranks do no work twice. A second pass reads decay
and drive and writes the states; to correct the first pass instead, h_t + (a_1 ... a_t) s, is to write and read the
cumulative products as well, to read and write the states, and to round otherwise than the loop over time does. An
all-gather instead of handing the state from rank to rank waits for one message rather than for as many as there are
ranks, and carries little: a state is as large as the drive of one token.

Other things that look back, at the last few tokens, take these from the slice before (`TimeSlices.before`).

Source: prefix sums of linear recurrences, Blelloch 1990 (CMU-CS-90-190), section 1.4; over slices of long sequences,
Martin and Cundy 2018 (arXiv 1709.04057), Mamba-2 (arXiv 2405.21060), section 8.2, LASP-2 (arXiv 2502.07563).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@dataclass(frozen=True)
class TimeSlices:
    """The slices of time of one group of ranks, of any lengths of at least one token; see `context_parallel`.

    All that communicates must be called by every rank of the group, in the same order.

    Args:
        group: the ranks, in the order of their slices.
        rank: this rank's number in the group, and so its slice's.
        size: ranks of the group, and so slices.
    """

    group: "dist.ProcessGroup"
    rank: int
    size: int

    def cut(self, x: Tensor) -> Tensor:
        """This rank's slice (B, about T / size, ...) of whole sequences (B, T, ...), where T need not divide.

        Raises:
            ValueError: if there are fewer tokens than slices.
        """
        if x.shape[1] < self.size:
            raise ValueError(f"a sequence of {x.shape[1]} tokens cannot be cut into {self.size} slices of at least one")
        return x.tensor_split(self.size, 1)[self.rank]

    def place(self, x: Tensor, time: int) -> Tensor:
        """The inverse of `cut` but for zeros: this rank's slice (B, t, ...) at its place in (B, T, ...)."""
        places = self.cut(torch.arange(time, device=x.device)[None])[0]
        return x.new_zeros(len(x), time, *x.shape[2:]).index_copy_(1, places, x)

    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, which must have one shape and dtype: (...) -> (size, ...). Without gradient."""
        x = x.detach().contiguous()
        parts = torch.view_as_real(x) if x.is_complex() else x
        every = parts.new_empty(self.size, *parts.shape)
        dist.all_gather(list(every.unbind()), parts, self.group)
        return torch.view_as_complex(every) if x.is_complex() else every

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, such as of the number of scored tokens: (...) -> (...). Without gradient."""
        return self.gather(x).sum(0)

    def before(self, x: Tensor, tokens: int) -> Tensor:
        """The last tokens before this slice, zero before the first: (B, T, ...) -> (B, tokens, ...).

        Differentiable. From rank to next rank, once, or more often where slices are shorter than that.
        """
        window = x.new_zeros(len(x), tokens, *x.shape[2:])
        for _ in range(self._hops(x, tokens)):
            window = _FromSliceBefore.apply(torch.cat([window, x[:, -tokens:]], 1)[:, -tokens:], self)
        return window

    def sum_gradients(self, parameters: Iterable[Parameter]) -> None:
        """Sums the gradients of parameters, those of each rank's slice, to those of the whole sequences."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        vector = parameters_to_vector(gradients)
        dist.all_reduce(vector, group=self.group)
        vector_to_parameters(vector, gradients)

    def incoming(self, products: Sequence[Tensor], ends: Sequence[Tensor], *, reverse: bool = False) -> Tensor:
        """The state before this slice, from product and end of every slice; in reverse those after it count.

        There must be such slices. Of the furthest of them the product is not read.
        """
        ranks = range(self.size - 1, self.rank, -1) if reverse else range(self.rank)
        state = ends[ranks[0]]
        for rank in ranks[1:]:
            state = torch.addcmul(ends[rank], products[rank], state)
        return state

    def is_first(self, reverse: bool = False) -> bool:
        """Whether no slice comes before this one, or in reverse none after it."""
        return self.rank == (self.size - 1 if reverse else 0)

    def _hops(self, x: Tensor, tokens: int) -> int:
        """How often tokens must be handed on until every rank has those that it needs."""
        if tokens <= 1:
            return tokens
        lengths = self.gather(torch.tensor(x.shape[1], device=x.device)).tolist()
        return max(_slices_that_hold(tokens, lengths[:rank]) for rank in range(self.size))


def _slices_that_hold(tokens: int, lengths: list[int]) -> int:
    """How many slices, from the last back, hold so many tokens; all if they do not."""
    held = 0
    for count, length in enumerate(reversed(lengths), 1):
        held += length
        if held >= tokens:
            return count
    return len(lengths)


_in_use: ContextVar[TimeSlices | None] = ContextVar("time slices", default=None)


@contextmanager
def context_parallel(group: "dist.ProcessGroup | None" = None) -> Iterator[TimeSlices]:
    """Within it, sequences are slices in time of longer ones: each rank of a group holds the part after its forerunner.

    Scans, causal convolutions and everything else that looks back take what they need from the slices before, and
    outputs and gradients are those of the whole sequences. Gradients of parameters, and of an initial state, are each
    rank's share: their sum over the ranks is the gradient. What is recorded for backpropagation remembers the group,
    so `backward` may be called within or after.

        with context_parallel() as slices:
            tokens, targets = slices.cut(tokens), slices.cut(targets)
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / slices.total(torch.tensor(targets.numel()))).backward()
        slices.sum_gradients(model.parameters())

    It holds for this thread, up to its end, and for nothing else. Every rank of the group must run the same forwards
    and backwards: one that fails alone leaves the others waiting up to the group's timeout. Compiled functions run
    uncompiled. A scan's gradient can be taken once only, and its initial state is read on the first rank (on the last
    if in reverse). What activation checkpointing runs again must run within `time_slices`.

    DistributedDataParallel, which takes the mean of the gradients over its ranks, may take the place of `sum_gradients`
    where the loss is multiplied by their number; so ranks may share batches out besides, in groups of slices.

    Args:
        group: the ranks, in the order of their slices; all that there are if not given.

    Raises:
        ValueError: if there is no process group yet, or this rank is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("context_parallel needs a process group: call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"context_parallel: rank {dist.get_rank()} is not in the group that it was given")
    slices = TimeSlices(group, rank, dist.get_world_size(group))
    with time_slices(slices):
        yield slices


@contextmanager
def time_slices(slices: TimeSlices | None) -> Iterator[None]:
    """Within it sequences are slices of these, as where `slices_in_use` gave them; whole sequences if they are None.

    Backward may run in threads of autograd's own, which know nothing of the contexts of others.
    """
    before = _in_use.set(slices)
    try:
        with nullcontext() if slices is None else torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _in_use.reset(before)


def slices_in_use() -> TimeSlices | None:
    """The slices that sequences are cut into where the caller runs, None where they are whole."""
    if torch.compiler.is_compiling():  # which happens outside only
        return None
    slices = _in_use.get()
    return slices if slices is not None and slices.size > 1 else None


def require_whole_sequences(name: str) -> None:
    """Raises ValueError where sequences are cut into slices, for what cannot be.

    Args:
        name: of what cannot.
    """
    if slices_in_use() is not None:
        raise ValueError(f"{name} needs whole sequences: it cannot run within context_parallel")


def tokens_before(x: Tensor, tokens: int) -> Tensor:
    """The last tokens before x, zero before the first of the sequence: (B, T, ...) -> (B, tokens, ...)."""
    slices = slices_in_use()
    return x.new_zeros(len(x), tokens, *x.shape[2:]) if slices is None else slices.before(x, tokens)


class _FromSliceBefore(torch.autograd.Function):
    """A tensor of the rank before, zero at the first; its gradient comes from the rank after."""

    @staticmethod
    def forward(ctx, x, slices):
        ctx.slices = slices
        return _hand_on(x, slices, 1)

    @staticmethod
    def backward(ctx, grad):
        return _hand_on(grad, ctx.slices, -1), None


def _hand_on(x: Tensor, slices: TimeSlices, step: int) -> Tensor:
    """Sends x so many ranks on, and returns what comes from as many ranks back, zero if there are none."""
    x, received, transfers = x.detach().contiguous(), torch.zeros_like(x, memory_format=torch.contiguous_format), []
    for transfer, tensor, peer in ((dist.isend, x, slices.rank + step), (dist.irecv, received, slices.rank - step)):
        if 0 <= peer < slices.size:
            transfers.append(dist.P2POp(transfer, tensor, group=slices.group, group_peer=peer))
    for transfer in dist.batch_isend_irecv(transfers):
        transfer.wait()
    return received
