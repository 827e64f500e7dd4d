"""What diagonal, fixed-point and dense mixers have in common: everything but how the states y are found.

    x, z = W_in u,    y = states(x),    s = normalise(y),    out_t = W_out ( read_out(c_t, s_t) * silu(z_t) )

The *feedback* at t is the state that the gates may read, shifted by one: s_{t-1}, and 0 before the first token. What
each term reads is chosen by a `StateDependence`; reading is linear, raw_t = W x_t + bias + V s_{t-1}. The state that is
carried on is y itself, never the normalised one, so the recurrence over time stays linear given its gates.

Source: Fixed-Point RNNs (arXiv 2503.10799), section 4.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.cores import Core
from fprnn_lightning.mixers.base import SequenceMixer, inner_width

NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class StateDependence:
    """Which terms of the recurrence read the previous state as well as the input.

    Args:
        decay: lambda, how fast the state is forgotten.
        channel_mixer: Q, how the channels are mixed.
        input: b, what is written.
        output: c, what is read out.
        normalise: whether the state that these read, and that is read out, is brought to unit root mean square.
    """

    decay: bool = True
    channel_mixer: bool = True
    input: bool = True
    output: bool = True
    normalise: bool = True


class TermProjection(nn.Module):
    """What several terms are made from: raw = W x + bias + V feedback, with V = 0 for terms that read x alone.

    Args:
        channels: D, of x and of the feedback.
        sizes: numbers per token of each term.
        dependent: for each term, whether it reads the feedback.
    """

    def __init__(self, channels: int, sizes: Sequence[int], dependent: Sequence[bool]) -> None:
        super().__init__()
        self.sizes, self.dependent = list(sizes), list(dependent)
        self.from_input = nn.Linear(channels, sum(sizes))
        read = sum(self._read_sizes())
        self.from_feedback = nn.Linear(channels, read, bias=False) if read else None

    def forward(self, raw: Tensor, feedback: Tensor | None) -> list[Tensor]:
        """The terms, from what they read of the input (..., sum of sizes) and the feedback (..., D) if there is one."""
        terms = list(raw.split(self.sizes, -1))
        if self.from_feedback is None or feedback is None:
            return terms
        read = self.from_feedback(feedback.to(self.from_feedback.weight.dtype))
        parts = iter(read.split(self._read_sizes(), -1))
        return [term + next(parts) if reads else term for term, reads in zip(terms, self.dependent, strict=True)]

    def feedback_weight(self) -> Tensor | None:
        """V for all terms (sum of sizes, D), 0 where a term reads x alone; None if no term reads the feedback."""
        if self.from_feedback is None:
            return None
        weight = self.from_feedback.weight
        if all(self.dependent):
            return weight
        blocks = iter(weight.split(self._read_sizes()))
        return torch.cat(
            [
                next(blocks) if reads else weight.new_zeros(size, weight.shape[1])
                for size, reads in zip(self.sizes, self.dependent, strict=True)
            ]
        )

    def _read_sizes(self) -> list[int]:
        return [size for size, reads in zip(self.sizes, self.dependent, strict=True) if reads]


class RecurrentMixer(SequenceMixer):
    """A core, and a channel mixer if there is one, between projections; subclasses say how the states are found.

    Args:
        width: channels of the input and of the output.
        expand: channels D of the core per channel of `width`.
        core: makes the core from D.
        channel_mixer: makes the channel mixer from D; None where Q = I.
        dependence: which terms read the previous state.
    """

    def __init__(
        self,
        width: int,
        expand: float,
        core: Callable[[int], Core],
        channel_mixer: Callable[[int], ChannelMixer] | None,
        dependence: StateDependence,
    ) -> None:
        super().__init__(width)
        channels = inner_width(width, expand)
        self.dependence = dependence
        self.core = core(channels)
        self.channel_mixer = None if channel_mixer is None else channel_mixer(channels)
        self.input_projection = nn.Linear(width, 2 * channels, bias=False)
        self.terms = TermProjection(
            channels,
            (
                self.core.decay_channels,
                self.channel_mixer.raw_channels if self.channel_mixer else 0,
                self.core.input_channels,
            ),
            (dependence.decay, dependence.channel_mixer, dependence.input),
        )
        self.output_term = TermProjection(channels, (self.core.output_channels,), (dependence.output,))
        self.output_projection = nn.Linear(channels, width, bias=False)

    @abstractmethod
    def states(self, x: Tensor, raw: Tensor) -> Tensor:
        """The states y of whole sequences: the core's input (B, T, D) and its raw terms (B, T, K) -> (B, T, D)."""

    @abstractmethod
    def next_state(self, x: Tensor, raw: Tensor, state: Tensor) -> Tensor:
        """The state after one more token: its input (B, D), its raw terms (B, K), the state before (B, D) -> (B, D)."""

    def normalise(self, y: Tensor) -> Tensor:
        """The state as the gates and the output see it: (..., D) -> (..., D)."""
        return functional.rms_norm(y, y.shape[-1:], eps=NORM_EPSILON) if self.dependence.normalise else y

    def gates_and_mixing(self, x: Tensor, raw: Tensor, feedback: Tensor | None, q: Any = None) -> tuple[Any, Any]:
        """The core's gates and the coefficients of Q, from the input, its raw terms and the feedback if there is one.

        Coefficients that are known already, because they read x alone, are given as q.
        """
        raw_decay, raw_mixer, raw_input = self.terms(raw, feedback)
        if q is None and self.channel_mixer is not None:
            q = self.channel_mixer.coefficients(raw_mixer)
        return self.core.gates(raw_decay, raw_input, x), q

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.input_projection(x).chunk(2, -1)
        s = self.normalise(self.states(_precise(x), _precise(self.terms.from_input(x))))
        return self._project_out(x, gate, s, shift(s))

    def initial_state(self, batch: int) -> Tensor:
        return _precise(self.output_projection.weight.new_zeros(batch, self.core.channels))

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = self.input_projection(x).chunk(2, -1)
        new_state = self.next_state(_precise(x), _precise(self.terms.from_input(x)), state)
        return self._project_out(x, gate, self.normalise(new_state), self.normalise(state)), new_state

    def _project_out(self, x: Tensor, gate: Tensor, s: Tensor, feedback: Tensor) -> Tensor:
        (raw_output,) = self.output_term(self.output_term.from_input(x), feedback)
        return self.output_projection((self.core.read_out(raw_output, s) * functional.silu(gate)).to(gate.dtype))


def _precise(x: Tensor) -> Tensor:
    """In float32 at least, as states, decays and the recurrence are even where the matrix products are not."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def shift(s: Tensor) -> Tensor:
    """s_{t-1} at t, and 0 at the first t: (B, T, D) -> (B, T, D)."""
    return functional.pad(s, (0, 0, 1, -1))
