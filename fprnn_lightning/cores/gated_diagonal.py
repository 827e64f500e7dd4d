"""The core of FP-RNN: a diagonal linear recurrence with gates for decay, input and output.

    h_t = lambda_t * h_{t-1} + (1 - lambda_t) * (w_t + residual_t),   w_t = b_t * x_t,   y_t = h_t,   out_t = c_t * y_t

with lambda_t = sigmoid(raw decay), b_t = 1 + raw input, c_t = 2 sigmoid(raw output).

Source: Fixed-Point RNNs (arXiv 2503.10799), equations 5-8: the stabilised form, with 1 - lambda on what comes in.
"""

from typing import NamedTuple

from torch import Tensor

from fprnn_lightning.cores.base import Core
from fprnn_lightning.scan import linear_scan


class Gates(NamedTuple):
    """decay (..., D) in (0, 1) and value (..., D)."""

    decay: Tensor
    value: Tensor


class GatedDiagonal(Core[Gates]):
    """The gated diagonal recurrence of FP-RNN; it carries D numbers.

    Args:
        channels: D.
    """

    carries_output = True

    def __init__(self, channels: int) -> None:
        super().__init__(channels, decay_channels=channels, input_channels=channels, output_channels=channels)

    def gates(self, raw_decay: Tensor, raw_input: Tensor, raw_output: None, x: Tensor) -> Gates:
        return Gates(raw_decay.sigmoid(), (1 + raw_input) * x)

    def sequence_pass(self, gates: Gates, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        driven = gates.value if residual is None else gates.value + residual
        h = linear_scan(gates.decay, (1 - gates.decay) * driven)
        return h, h[:, -1]

    def initial_carry(self, like: Tensor) -> Tensor:
        return like.new_zeros(len(like), self.channels)

    def token_pass(self, gates: Gates, carry: Tensor) -> tuple[Tensor, Tensor]:
        gain = 1 - gates.decay
        return gates.decay * carry + gain * gates.value, gain

    def residual_gain(self, gates: Gates) -> Tensor:
        return 1 - gates.decay

    def decays(self, gates: Gates) -> Tensor:
        return gates.decay

    def flops(self) -> int:
        return 5 * self.channels  # lambda h + (1 - lambda) (w + residual)

    def next_carry(self, gates: Gates, carry: Tensor, residual: Tensor | None) -> Tensor:
        offset, gain = self.token_pass(gates, carry)
        return offset if residual is None else offset + gain * residual

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return y

    def read_out(self, raw_output: Tensor, s: Tensor) -> Tensor:
        return 2 * raw_output.sigmoid() * s
