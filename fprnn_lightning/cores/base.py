"""A core is a diagonal sequence mixer as a function of its input, which a channel mixer may have mixed.

Of every token it first makes the *value* w_t, which the channel mixer works on, and passes what comes out over time:

    y = core(mixed),    diagonal: mixed = w,    fixed point: mixed = w + (I - Q)(y - w) = Q w + (I - Q) y.

Only y, D numbers per token, travels between iterations. What its gates are made from (so many numbers per token for the
decay, the input and the output) is projected by the sequence mixer, so a core does not know what its gates depend on.

Source: Fixed-Point RNNs (arXiv 2503.10799), equations 5-8.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

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

    def __init__(self, channels: int, decay_channels: int, input_channels: int, output_channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.decay_channels = decay_channels
        self.input_channels = input_channels
        self.output_channels = output_channels

    @abstractmethod
    def gates(self, raw_decay: Tensor, raw_input: Tensor, x: Tensor) -> Gates:
        """The gates of every token, with its value as field `value` (..., D), from what they read and the input."""

    @abstractmethod
    def sequence_pass(self, gates: Gates, mixed: Tensor) -> Tensor:
        """One pass over time, in parallel, from the zero state: mixed (B, T, D) -> y (B, T, D)."""

    @abstractmethod
    def token_pass(self, gates: Gates, state: Tensor) -> tuple[Tensor, Tensor]:
        """The pass over one token, y = offset + gain * mixed: the state before it (B, D) -> offset and gain (B, D)."""

    @abstractmethod
    def read_out(self, raw_output: Tensor, y: Tensor) -> Tensor:
        """What leaves the layer: y (..., D), normalised if wanted, under the output gate -> (..., D)."""
