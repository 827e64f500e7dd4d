"""The dense mixer: the fixed point solved exactly, one time step after another, with the full gradient through time.

Given the state before it, every term of token t is known, and its fixed point is a linear system. With the core's pass
over one token written as y = offset + gain * (I - Q)(y - w),

    y_t = w_t + M_t^-1 ( offset_t - w_t ),    M_t = I - diag(gain_t) (I - Q_t),

for FP-RNN's core y_t = w_t + M_t^-1 ( lambda_t * (y_{t-1} - w_t) ). The channel mixer solves it.

Source: derived from Fixed-Point RNNs (arXiv 2503.10799), equations 3-8.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.cores import Core
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.mixers.base import Cost
from fprnn_lightning.mixers.dense_recurrence import DenseRecurrence
from fprnn_lightning.mixers.recurrent import RecurrentMixer, State, StateDependence
from fprnn_lightning.scan import resolve_backend
from fprnn_lightning.scan.context_parallel import require_whole_sequences


class DenseMixer(RecurrentMixer):
    """A dense RNN: the fixed point solved exactly, token by token.

    Args:
        width: channels of the input and of the output.
        expand: channels D of the core per channel of `width`.
        core: makes the core from D.
        channel_mixer: makes the channel mixer from D.
        dependence: which terms read the previous state.
        convolution: tokens that a causal convolution before the core sees (4 in Mamba); 0 leaves it out.
        fused: whether to use the CPU kernel where there is one (GatedDiagonal with Householder).
    """

    can_be_sliced = False  # it walks through time

    def __init__(
        self,
        width: int,
        expand: float = 2.0,
        core: Callable[[int], Core] = GatedDiagonal,
        channel_mixer: Callable[[int], ChannelMixer] = Householder,
        dependence: StateDependence = StateDependence(),
        convolution: int = 0,
        fused: bool = True,
    ) -> None:
        super().__init__(width, expand, core, channel_mixer, dependence, convolution)
        self.fused = fused

    def cost(self, time: int) -> Cost:
        mixing = self.channel_mixer.coefficients_flops() + self.channel_mixer.solve_flops()
        if not self.core.carries_output:  # the carry is made from the residual
            mixing += self.channel_mixer.residual_flops()
        return Cost(once=self.projection_flops() + self.read_flops() + self.core.flops() + mixing)

    @torch.compiler.disable(reason="a loop over time, or one kernel")
    def states(self, x: Tensor, raw: Tensor) -> Tensor:
        require_whole_sequences("DenseMixer")
        if self._kernels_fit(x):
            weight = self.terms.feedback_weight()
            weight = None if weight is None else weight.to(x.dtype)
            return DenseRecurrence.apply(raw, x, weight, self.channel_mixer.rank, self.dependence.normalise)
        q = None if self.channel_mixer.raw_channels else self.channel_mixer.coefficients(raw[..., :0])
        state, states = self.initial_state(len(x)), []
        for x_t, raw_t in zip(x.unbind(1), raw.unbind(1), strict=True):
            state = self.advance(x_t, raw_t, state, q)
            states.append(state.y)
        return torch.stack(states, 1)

    def next_y(self, gates: Any, q: Any, state: State) -> Tensor:
        offset, gain = self.core.token_pass(gates, state.carry)
        return gates.value + self.channel_mixer.solve(q, gain, offset - gates.value)

    def _kernels_fit(self, x: Tensor) -> bool:
        pair = type(self.core) is GatedDiagonal and type(self.channel_mixer) is Householder
        return self.fused and pair and self.channel_mixer.largest == 1 and resolve_backend(x) == "cpu"
