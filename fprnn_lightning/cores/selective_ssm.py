"""The core of Mamba: every channel drives N states that decay at rates of their own, and reads their sum.

    H_t = exp(dt_t A) * H_{t-1} + (dt_t * (w_t + kappa_t * residual_t)) b_t^T,    w_t = x_t,    y_t = H_t c_t

and y + D * x is seen of it, with dt_t = softplus(W raw decay + bias), W of low rank, A = -exp(A_log) that begins as -1,
..., -N (S4D-real), and b_t and c_t the raw input and output, brought to unit length over the N states if wanted.

In a fixed point dt takes the place of 1 - lambda, but where that is below 1 - exp(-dt), Euler's step dt on what comes
in is above it and would make the loop unstable. So the residual's weight is that of the slowest state's exact step,

    dt * kappa = 1 - exp(dt max A) = 1 - lambda,    and so    ||H_t|| (1 - (1 - lambda) ||I - Q||) <= lambda ||H_{t-1}||

without input, for unit b and c and one lambda: no growth while ||I - Q|| <= 1. Where channels differ in lambda, which
changes from token to token, steps that shrink alone may grow together, here as in FP-RNN. The paper's loop instead
takes dt, keeps D in the loop and normalises y there; such a loop has several fixed points (two of opposite sign along a
direction that Q removes), and which one is found depends on where it starts. Here only what is seen of y is normalised.

Source: Mamba (arXiv 2312.00752), algorithm 2; in the fixed point: Fixed-Point RNNs (arXiv 2503.10799), equation 12.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fprnn_lightning.cores.base import Core
from fprnn_lightning.cores.step_size import residual_weight, step_size_bias
from fprnn_lightning.scan import selective_scan

CHANNELS_PER_RANK = 32  # Mamba's D / dt_rank


class Gates(NamedTuple):
    """value (..., D), step size dt > 0 (..., D, or one for each head), input b (..., N) and output c (..., N)."""

    value: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor


class SelectiveSSM(Core[Gates]):
    """The selective state-space recurrence of Mamba; it carries D x N numbers.

    Args:
        channels: D.
        states: N, states of every channel.
        dt_rank: numbers per token that the D step sizes are made from; None is D / 32, Mamba's.
        unit_gates: whether b and c are brought to unit length; a fixed point needs it to be stable.

    Raises:
        ValueError: if states or dt_rank is less than 1.
    """

    carries_output = False

    def __init__(self, channels: int, states: int = 16, dt_rank: int | None = None, unit_gates: bool = True) -> None:
        rank = -(-channels // CHANNELS_PER_RANK) if dt_rank is None else dt_rank
        if states < 1 or rank < 1:
            raise ValueError(f"SelectiveSSM: states is {states} and dt_rank {rank}, both must be at least 1")
        super().__init__(channels, decay_channels=rank, input_channels=states, output_channels=states)
        self.unit_gates = unit_gates
        self.dt_weight = nn.Parameter(torch.empty(channels, rank).uniform_(-1, 1) * rank**-0.5)
        self.dt_bias = nn.Parameter(step_size_bias(channels))
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(channels, 1))
        self.A_log.no_weight_decay = True
        self.D = nn.Parameter(torch.ones(channels))

    def gates(self, raw_decay: Tensor, raw_input: Tensor, raw_output: Tensor, x: Tensor) -> Gates:
        dt = functional.linear(raw_decay.to(self.dt_weight.dtype), self.dt_weight).to(x.dtype) + self.dt_bias
        b, c = (functional.normalize(raw, dim=-1) if self.unit_gates else raw for raw in (raw_input, raw_output))
        return Gates(x, functional.softplus(dt), b, c)

    def sequence_pass(self, gates: Gates, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return selective_scan(self._driven(gates, residual), gates.dt, self._rates(gates), gates.b, gates.c)

    def initial_carry(self, like: Tensor) -> Tensor:
        return like.new_zeros(len(like), *self.A_log.shape)

    def token_pass(self, gates: Gates, carry: Tensor) -> tuple[Tensor, Tensor]:
        offset = (self._decay(gates) * carry * gates.c[:, None]).sum(-1) + self._value_gain(gates) * gates.value
        return offset, self.residual_gain(gates)

    def residual_gain(self, gates: Gates) -> Tensor:
        return self._value_gain(gates) * self._residual_weight(gates)

    def decays(self, gates: Gates) -> Tensor:
        return self._decay(gates).flatten(-2)

    def flops(self) -> int:
        states, rank = self.input_channels, self.decay_channels
        return self.channels * (2 * rank + 7 * states + 3)  # dt; exp(dt A) H + (dt driven) b, times c, summed

    def next_carry(self, gates: Gates, carry: Tensor, residual: Tensor | None) -> Tensor:
        driven = gates.dt * self._driven(gates, residual)
        return self._decay(gates) * carry + driven[..., None] * gates.b[:, None]

    def output(self, y: Tensor, x: Tensor) -> Tensor:
        return y + self.D * x

    def read_out(self, raw_output: None, s: Tensor) -> Tensor:
        return s

    def _value_gain(self, gates: Gates) -> Tensor:
        return gates.dt * (gates.b * gates.c).sum(-1, keepdim=True)

    def _driven(self, gates: Gates, residual: Tensor | None) -> Tensor:
        return gates.value if residual is None else gates.value + self._residual_weight(gates) * residual

    def _residual_weight(self, gates: Gates) -> Tensor:
        return residual_weight(gates.dt, self._rates(gates).amax(-1))

    def _rates(self, gates: Gates) -> Tensor:
        return -self.A_log.to(gates.dt.dtype).exp()

    def _decay(self, gates: Gates) -> Tensor:
        return (gates.dt[..., None] * self._rates(gates)).exp()
