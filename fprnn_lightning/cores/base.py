"""A core is a diagonal sequence mixer, which a channel mixer may make dense.

Of every token it first makes the *value* w_t, and passes it over time. Where there is a channel mixer Q, the *residual*
(I - Q)(y - w) comes in with it, weighted so that each token's fixed point is stable where ||I - Q|| < 1:

    y = core(w + kappa * residual),    diagonal: Q = I, so residual = 0,    fixed point: residual = (I - Q)(y - w).

Only y, D numbers per token, travels between iterations; the *carry*, what goes from one token to the next, may be more.
What its gates are made from (so many numbers per token for the decay, the input and the output) is projected by the
sequence mixer, so a core does not know what its gates depend on.

Source: Fixed-Point RNNs (arXiv 2503.10799), equations 5-8 and 12.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from torch import Tensor, nn

Gates = TypeVar("Gates")


class Core(nn.Module, ABC, Generic[Gates]):
    """A diagonal sequence mixer on D channels.

    Args:
        channels: D.
        decay_channels: numbers per token that the decay is made from.
        input_channels: numbers per token that the input gate is made from.
        output_channels: numbers per token that the output gate is made from.
    """

    carries_output: ClassVar[bool]
    """Whether y itself is carried on, and read by the output gate afterwards; else that gate reads y from the carry."""

    def __init__(self, channels: int, decay_channels: int, input_channels: int, output_channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.decay_channels = decay_channels
        self.input_channels = input_channels
        self.output_channels = output_channels

    @abstractmethod
    def gates(self, raw_decay: Tensor, raw_input: Tensor, raw_output: Tensor | None, x: Tensor) -> Gates:
        """The gates of every token, with its value as field `value` (..., D), from what they read and the input.

        raw_output is None where the core carries its output.
        """

    @abstractmethod
    def sequence_pass(self, gates: Gates, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """One pass over time, in parallel, from the zero carry -> y (B, T, D) and the last carry.

        The residual is (B, T, D), or None where Q = I.
        """

    @abstractmethod
    def initial_carry(self, like: Tensor) -> Tensor:
        """The carry before the first token, zero: an input of one token (B, D) tells batch, dtype and device."""

    @abstractmethod
    def token_pass(self, gates: Gates, carry: Tensor) -> tuple[Tensor, Tensor]:
        """The pass over one token, y = offset + gain * residual: the carry before it -> offset and gain (B, D)."""

    @abstractmethod
    def residual_gain(self, gates: Gates) -> Tensor:
        """The gain of `token_pass`, of tokens of any leading axes: (..., D)."""

    @abstractmethod
    def decays(self, gates: Gates) -> Tensor:
        """What is kept of each of the numbers carried, in [0, 1], once where they share it: (..., numbers)."""

    @abstractmethod
    def flops(self) -> int:
        """Operations per token, a multiplication and an addition being two: products in the gates, and one pass."""

    @abstractmethod
    def next_carry(self, gates: Gates, carry: Tensor, residual: Tensor | None) -> Tensor:
        """The carry after one token: the one before it and its residual (B, D), None where Q = I."""

    @abstractmethod
    def output(self, y: Tensor, x: Tensor) -> Tensor:
        """What there is to see of y, with what passes by the recurrence from the input: two (..., D) -> (..., D)."""

    @abstractmethod
    def read_out(self, raw_output: Tensor | None, s: Tensor) -> Tensor:
        """What leaves the layer: the output (..., D), normalised if wanted, under the output gate -> (..., D)."""
