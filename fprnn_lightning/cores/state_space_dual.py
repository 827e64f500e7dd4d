"""The core of Mamba-2: heads of P channels, whose N states each all decay at one rate.

    H_t = exp(dt_t A) H_{t-1} + (dt_t (w_t + kappa_t residual_t)) b_t^T,   w_t = x_t,   y_t = H_t c_t   for every head

and y + D x is seen of it, with dt_t = softplus(raw decay + bias) and A = -exp(A_log), one number per head, b_t and c_t,
shared by the heads, the raw input and output, brought to unit length over the N states if wanted, and the residual's
weight dt kappa = 1 - exp(dt A), for the reason given in `selective_ssm.py`.

Source: Mamba-2 (arXiv 2405.21060), section 7; in the fixed point: Fixed-Point RNNs (arXiv 2503.10799), equation 12.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fprnn_lightning.cores.base import Core
from fprnn_lightning.cores.selective_ssm import Gates
from fprnn_lightning.cores.step_size import residual_weight, step_size_bias
from fprnn_lightning.scan import state_space_dual


class StateSpaceDual(Core[Gates]):
    """The state-space dual recurrence of Mamba-2; it carries D x N numbers.

    Args:
        channels: D.
        states: N, states of every channel.
        head_channels: P, channels of every head.
        unit_gates: whether b and c are brought to unit length; a fixed point needs it to be stable.

    Raises:
        ValueError: if states is less than 1, or the channels are no whole number of heads.
    """

    carries_output = False

    def __init__(self, channels: int, states: int = 64, head_channels: int = 64, unit_gates: bool = True) -> None:
        if states < 1:
            raise ValueError(f"StateSpaceDual: states is {states}, must be at least 1")
        if head_channels < 1 or channels % head_channels:
            raise ValueError(f"StateSpaceDual: head_channels is {head_channels}, must divide the {channels} channels")
        heads = channels // head_channels
        super().__init__(channels, decay_channels=heads, input_channels=states, output_channels=states)
        self.head_channels = head_channels
        self.unit_gates = unit_gates
        self.dt_bias = nn.Parameter(step_size_bias(heads))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(heads))

    def gates(self, raw_decay: Tensor, raw_input: Tensor, raw_output: Tensor, x: Tensor) -> Gates:
        b, c = (functional.normalize(raw, dim=-1) if self.unit_gates else raw for raw in (raw_input, raw_output))
        return Gates(x, functional.softplus(raw_decay + self.dt_bias), b, c)

    def sequence_pass(self, gates: Gates, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        driven = self._driven(gates, residual)
        y, carry = state_space_dual(driven, gates.dt, self._rates(gates), gates.b, gates.c)
        return y.flatten(-2), carry

    def initial_carry(self, like: Tensor) -> Tensor:
        return like.new_zeros(len(like), self.decay_channels, self.head_channels, self.input_channels)

    def token_pass(self, gates: Gates, carry: Tensor) -> tuple[Tensor, Tensor]:
        kept = (self._decay(gates) * (carry @ gates.c[:, None, :, None]))[..., 0]
        offset = (kept + self._value_gain(gates) * self._heads(gates.value)).flatten(-2)
        return offset, self.residual_gain(gates)

    def residual_gain(self, gates: Gates) -> Tensor:
        weighted = self._value_gain(gates) * self._residual_weight(gates)
        return weighted.expand(*weighted.shape[:-1], self.head_channels).flatten(-2)

    def decays(self, gates: Gates) -> Tensor:
        return self._decay(gates)[..., 0, 0]

    def flops(self) -> int:
        return self.channels * (5 * self.input_channels + 3)  # decay H + (dt driven) b, times c, summed

    def next_carry(self, gates: Gates, carry: Tensor, residual: Tensor | None) -> Tensor:
        driven = gates.dt[..., None] * self._driven(gates, residual)
        return self._decay(gates) * carry + driven[..., None] * gates.b[:, None, None]

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return y + (self.D[:, None] * self._heads(x)).flatten(-2)

    def read_out(self, raw_output: None, s: Tensor) -> Tensor:
        return s

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_channels))

    def _value_gain(self, gates: Gates) -> Tensor:
        return (gates.dt * (gates.b * gates.c).sum(-1, keepdim=True))[..., None]  # ... H 1

    def _driven(self, gates: Gates, residual: Tensor | None) -> Tensor:
        value = self._heads(gates.value)
        return value if residual is None else value + self._residual_weight(gates) * self._heads(residual)

    def _residual_weight(self, gates: Gates) -> Tensor:
        return residual_weight(gates.dt, self._rates(gates))[..., None]

    def _rates(self, gates: Gates) -> Tensor:
        return -self.A_log.to(gates.dt.dtype).exp()

    def _decay(self, gates: Gates) -> Tensor:
        """exp(dt A) over the axes of the carry: (B, H, 1, 1)."""
        return (gates.dt * self._rates(gates)).exp()[..., None, None]
