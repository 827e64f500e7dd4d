"""What diagonal, fixed-point and dense mixers have in common: everything but how the states y are found.

    x, z = W_in u,   y = states(x),   s = normalise(output(y, x)),   out_t = W_out ( read_out(c_t, s_t) * silu(z_t) )

The *feedback* at t is the state that the gates may read, shifted by one: s_{t-1}, and 0 before the first token. What
each term reads is chosen by a `StateDependence`; reading is linear, raw_t = W x_t + bias + V s_{t-1}. What is carried
on is never normalised, so the recurrence over time stays linear given its gates.

Source: Fixed-Point RNNs (arXiv 2503.10799), section 4.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.cores import Core
from fprnn_lightning.mixers.base import Iteration, Profile, SequenceMixer, inner_width
from fprnn_lightning.mixers.contraction import contraction, contraction_bound
from fprnn_lightning.mixers.convolution import CausalConvolution
from fprnn_lightning.scan.context_parallel import (
    require_whole_sequences,
    slices_in_use,
    time_slices,
    tokens_before,
)

NORM_EPSILON = 1e-6
TOKENS_OF_DECAYS = 64  # of each sequence whose decays a profile has, evenly spaced


@dataclass(frozen=True)
class StateDependence:
    """Which terms of the recurrence read the previous state as well as the input.

    Args:
        decay: lambda (or the step size dt), how fast the state is forgotten.
        channel_mixer: Q, how the channels are mixed.
        input: b, what is written.
        output: c, what is read out.
        normalise: whether the state that these read, and that is read out, is brought to unit root mean square.
        symmetric: whether Q reads the sum x_t + s_{t-1}, by one matrix, instead of x_t and s_{t-1} by one each.
    """

    decay: bool = True
    channel_mixer: bool = True
    input: bool = True
    output: bool = True
    normalise: bool = True
    symmetric: bool = False


class State(NamedTuple):
    """What a mixer knows of the tokens so far.

    The core's carry, the last y and what is seen of it, both (B, D), and the convolution's window (B, tokens - 1, D).
    """

    carry: Tensor
    y: Tensor
    seen: Tensor
    window: Tensor


class TermProjection(nn.Module):
    """What several terms are made from: raw = W x + bias + V feedback, with V = 0 for terms that read x alone.

    Args:
        channels: D, of x and of the feedback.
        sizes: numbers per token of each term.
        dependent: for each term, whether it reads the feedback.
        symmetric: for each term that does, whether it reads x + feedback, that is, V = W.
    """

    def __init__(
        self, channels: int, sizes: Sequence[int], dependent: Sequence[bool], symmetric: Sequence[bool]
    ) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.dependent = [reads and size > 0 for size, reads in zip(sizes, dependent, strict=True)]
        self.symmetric = [reads and ties for reads, ties in zip(self.dependent, symmetric, strict=True)]
        self.from_input = nn.Linear(channels, sum(sizes))
        own = sum(self._select(self.sizes, self.dependent)) - sum(self._select(self.sizes, self.symmetric))
        self.from_feedback = nn.Linear(channels, own, bias=False) if own else None

    @property
    def reads_feedback(self) -> bool:
        """Whether any term does."""
        return any(self.dependent)

    @property
    def read_channels(self) -> int:
        """Numbers per token of the terms that do."""
        return sum(self._select(self.sizes, self.dependent))

    def forward(self, raw: Tensor, feedback: Tensor | None) -> list[Tensor]:
        """The terms, from what they read of the input (..., sum of sizes) and the feedback (..., D) if there is one."""
        terms = list(raw.split(self.sizes, -1))
        if feedback is None or not self.reads_feedback:
            return terms
        parts = iter(self.read(feedback).split(self._select(self.sizes, self.dependent), -1))
        return [term + next(parts) if reads else term for term, reads in zip(terms, self.dependent, strict=True)]

    def read(self, feedback: Tensor) -> Tensor:
        """V feedback, of the terms that read it: (..., D) -> (..., sum of their sizes)."""
        weight = self.read_weight()
        return functional.linear(feedback.to(weight.dtype), weight)

    def feedback_weight(self) -> Tensor | None:
        """V for all terms (sum of sizes, D), 0 where a term reads x alone; None if no term reads the feedback."""
        if not self.reads_feedback:
            return None
        weight = self.read_weight()
        if all(self.dependent):
            return weight
        blocks = iter(weight.split(self._select(self.sizes, self.dependent)))
        return torch.cat(
            [
                next(blocks) if reads else weight.new_zeros(size, weight.shape[1])
                for size, reads in zip(self.sizes, self.dependent, strict=True)
            ]
        )

    def read_weight(self) -> Tensor:
        """The rows of V of the terms that read the feedback, one term after another."""
        if not any(self.symmetric):
            return self.from_feedback.weight
        rows = self.from_input.weight.split(self.sizes)
        if self.from_feedback is not None:
            own = [reads and not ties for reads, ties in zip(self.dependent, self.symmetric, strict=True)]
            blocks = iter(self.from_feedback.weight.split(self._select(self.sizes, own)))
            rows = [next(blocks) if reads else row for row, reads in zip(rows, own, strict=True)]
        return torch.cat(self._select(rows, self.dependent))

    @staticmethod
    def _select(items: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        return [item for item, wants in zip(items, wanted, strict=True) if wants]


class RecurrentMixer(SequenceMixer):
    """A core, and a channel mixer if there is one, between projections; subclasses say how the states are found.

    Args:
        width: channels of the input and of the output.
        expand: channels D of the core per channel of `width`.
        core: makes the core from D.
        channel_mixer: makes the channel mixer from D; None where Q = I.
        dependence: which terms read the previous state.
        convolution: tokens that a causal convolution before the core sees; 0 leaves it out.

    Raises:
        ValueError: if a size is out of range.
    """

    can_be_sliced = True

    def __init__(
        self,
        width: int,
        expand: float,
        core: Callable[[int], Core],
        channel_mixer: Callable[[int], ChannelMixer] | None,
        dependence: StateDependence,
        convolution: int,
    ) -> None:
        super().__init__(width)
        if convolution < 0:
            raise ValueError(f"{type(self).__name__}: convolution is {convolution}, must be at least 0")
        channels = inner_width(width, expand)
        self.dependence = dependence
        self.core = core(channels)
        self.channel_mixer = None if channel_mixer is None else channel_mixer(channels)
        self.convolution = CausalConvolution(channels, convolution) if convolution else None
        self.input_projection = nn.Linear(width, 2 * channels, bias=False)
        output_terms = (self.core.output_channels, dependence.output, False)
        terms = [
            (self.core.decay_channels, dependence.decay, False),
            (
                self.channel_mixer.raw_channels if self.channel_mixer else 0,
                dependence.channel_mixer,
                dependence.symmetric,
            ),
            (self.core.input_channels, dependence.input, False),
        ]
        if not self.core.carries_output:
            terms.append(output_terms)
        self.terms = TermProjection(channels, *zip(*terms, strict=True))
        self.output_term = None
        if self.core.carries_output:
            self.output_term = TermProjection(channels, *zip(output_terms))
        self.output_projection = nn.Linear(channels, width, bias=False)

    @abstractmethod
    def states(self, x: Tensor, raw: Tensor) -> Tensor:
        """The states y of whole sequences: the core's input (B, T, D) and its raw terms (B, T, K) -> (B, T, D)."""

    @abstractmethod
    def next_y(self, gates: Any, q: Any, state: State) -> Tensor:
        """y after one more token, from its gates, the coefficients of Q and the state before it -> (B, D)."""

    def describe(self) -> dict[str, str | int | float]:
        mixing = {} if self.channel_mixer is None else self.channel_mixer.describe()
        return {**super().describe(), "core": type(self.core).__name__, **mixing}

    def projection_flops(self) -> int:
        """Operations per token of all that is computed once whatever finds the states: projections, convolution."""
        weights = [self.input_projection.weight, self.terms.from_input.weight, self.output_projection.weight]
        if self.convolution is not None:
            weights.append(self.convolution.filters.weight)
        read = 0
        if self.output_term is not None:
            weights.append(self.output_term.from_input.weight)
            read = self.core.channels * self.output_term.read_channels
        return 2 * (sum(weight.numel() for weight in weights) + read)

    def read_flops(self) -> int:
        """Operations per token of V s_{t-1}."""
        return 2 * self.core.channels * self.terms.read_channels

    def profile(self, u: Tensor) -> Profile:
        require_whole_sequences(f"{type(self).__name__}.profile")
        with torch.inference_mode(False), torch.no_grad():
            u = u.clone()  # one made in inference mode is of no use to the estimate, which transposes by autograd
            x, _, _ = self._project_in(u, self._initial_window(u))
            x, raw = _precise(x), _precise(self.terms.from_input(x))
            y, iteration = self.observed_states(x, raw)
            gates, q = self.gates_and_mixing(x, raw, shift(self.seen(y, x)))
            every = -(-x.shape[1] // TOKENS_OF_DECAYS)
            decays = self.core.decays(type(gates)(*(gate[:, ::every] for gate in gates))).flatten()
            if self.channel_mixer is None:
                return Profile(decays)
            gain = self.core.residual_gain(gates)
            factors = (factor(self.channel_mixer, q, gain) for factor in (contraction, contraction_bound))
            return Profile(decays, *factors, iteration)

    def observed_states(self, x: Tensor, raw: Tensor) -> tuple[Tensor, Iteration | None]:
        """The states, as `states` in evaluation, and how their iteration went on if there is one."""
        return self.states(x, raw), None

    def seen(self, y: Tensor, x: Tensor) -> Tensor:
        """The states as the gates and the output see them, from y and the core's input: two (..., D) -> (..., D)."""
        s = self.core.output(y, x)
        return functional.rms_norm(s, s.shape[-1:], eps=NORM_EPSILON) if self.dependence.normalise else s

    def gates_and_mixing(self, x: Tensor, raw: Tensor, feedback: Tensor | None, q: Any = None) -> tuple[Any, Any]:
        """The core's gates and the coefficients of Q, from the input, its raw terms and the feedback if there is one.

        Coefficients that are known already, because they read x alone, are given as q.
        """
        raw_decay, raw_mixer, raw_input, *raw_output = self.terms(raw, feedback)
        if q is None and self.channel_mixer is not None:
            q = self.channel_mixer.coefficients(raw_mixer)
        return self.core.gates(raw_decay, raw_input, *(raw_output or [None]), x), q

    def residual(self, gates: Any, q: Any, y: Tensor) -> Tensor | None:
        """(I - Q)(y - w), what goes into the core's pass with the value w; None where Q = I."""
        return None if self.channel_mixer is None else self.channel_mixer.residual_apply(q, y - gates.value)

    def forward(self, u: Tensor) -> Tensor:
        x, gate, _ = self._project_in(u, None)
        precise = _precise(x)
        s = self.seen(self.states(precise, _precise(self.terms.from_input(x))), precise)
        reads = self.output_term is not None and self.output_term.reads_feedback
        return self._project_out(x, gate, s, feedback(s) if reads else None)

    def repeatable(self) -> Callable[[], AbstractContextManager[None]]:
        """On the same slices of time, if sequences are cut."""
        slices = slices_in_use()
        return nullcontext if slices is None else partial(time_slices, slices)

    def prefill(self, u: Tensor) -> tuple[Tensor, State]:
        require_whole_sequences(f"{type(self).__name__}.prefill")
        x, gate, window = self._project_in(u, self._initial_window(u))
        precise, raw = _precise(x), _precise(self.terms.from_input(x))
        y = self.states(precise, raw)
        s = self.seen(y, precise)
        gates, q = self.gates_and_mixing(precise, raw, shift(s))
        _, carry = self.core.sequence_pass(gates, self.residual(gates, q, y))
        return self._project_out(x, gate, s, shift(s)), State(carry, y[:, -1], s[:, -1], window)

    def initial_state(self, batch: int) -> State:
        zeros = _precise(self.output_projection.weight.new_zeros(batch, self.core.channels))
        return State(self.core.initial_carry(zeros), zeros, zeros, self._initial_window(zeros))

    def step(self, u: Tensor, state: State) -> tuple[Tensor, State]:
        x, gate, window = self._project_in(u[:, None], state.window)
        x, gate = x[:, 0], gate[:, 0]
        new = self.advance(_precise(x), _precise(self.terms.from_input(x)), state)
        return self._project_out(x, gate, new.seen, state.seen), new._replace(window=window)

    def advance(self, x: Tensor, raw: Tensor, state: State, q: Any = None) -> State:
        """The state after one more token: its input (B, D), its raw terms (B, K), and the state before.

        Coefficients of Q that are known already are given as q.
        """
        gates, q = self.gates_and_mixing(x, raw, state.seen, q)
        y = self.next_y(gates, q, state)
        carry = y
        if not self.core.carries_output:
            carry = self.core.next_carry(gates, state.carry, self.residual(gates, q, y))
        return State(carry, y, self.seen(y, x), state.window)

    def _project_in(self, u: Tensor, window: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The core's input and the output gate, both (B, T, D), and the convolution's next window."""
        x, gate = self.input_projection(u).chunk(2, -1)
        if self.convolution is not None:
            x, window = self.convolution(x, window)
        return x, gate, window

    def _initial_window(self, like: Tensor) -> Tensor:
        before = 0 if self.convolution is None else self.convolution.before
        return like.new_zeros(len(like), before, self.core.channels)

    def _project_out(self, x: Tensor, gate: Tensor, s: Tensor, feedback: Tensor | None) -> Tensor:
        raw_output = None
        if self.output_term is not None:
            (raw_output,) = self.output_term(self.output_term.from_input(x), feedback)
        return self.output_projection((self.core.read_out(raw_output, s) * functional.silu(gate)).to(gate.dtype))


def _precise(x: Tensor) -> Tensor:
    """In float32 at least, as states, decays and the recurrence are even where the matrix products are not."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def feedback(s: Tensor) -> Tensor:
    """s_{t-1} at t as `shift` gives it, or on a slice of time s of the slice before at the first t."""
    return shift(s) if slices_in_use() is None else torch.cat([tokens_before(s, 1), s[:, :-1]], 1)


def shift(s: Tensor) -> Tensor:
    """s_{t-1} at t, and 0 at the first t: (B, T, D) -> (B, T, D)."""
    return functional.pad(s, (0, 0, 1, -1))
