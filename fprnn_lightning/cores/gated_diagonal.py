"""The core of FP-RNN: a diagonal linear recurrence with gates for decay, input and output.

    h_t = lambda_t * h_{t-1} + (1 - lambda_t) * mixed_t,    w_t = b_t * x_t,    y_t = h_t,    out_t = c_t * y_t

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
    """The gated diagonal recurrence of FP-RNN; its state is D numbers.

    Args:
        channels: D.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, decay_channels=channels, input_channels=channels, output_channels=channels)

    def gates(self, raw_decay: Tensor, raw_input: Tensor, x: Tensor) -> Gates:
        return Gates(raw_decay.sigmoid(), (1 + raw_input) * x)

    def sequence_pass(self, gates: Gates, mixed: Tensor) -> Tensor:
        return linear_scan(gates.decay, (1 - gates.decay) * mixed)

    def token_pass(self, gates: Gates, state: Tensor) -> tuple[Tensor, Tensor]:
        return gates.decay * state, 1 - gates.decay

    def read_out(self, raw_output: Tensor, y: Tensor) -> Tensor:
        return 2 * raw_output.sigmoid() * y
