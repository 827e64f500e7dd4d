"""The diagonal mixer: one pass of its core, Q = I, and nothing reads the state.

With `GatedDiagonal` it is LRU-like, with `SelectiveSSM` Mamba, with `StateSpaceDual` Mamba-2.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fprnn_lightning.cores import Core
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.mixers.base import Cost
from fprnn_lightning.mixers.recurrent import RecurrentMixer, State, StateDependence


class DiagonalMixer(RecurrentMixer):
    """A diagonal linear RNN: one parallel pass over time.

    Args:
        width: channels of the input and of the output.
        expand: channels D of the core per channel of `width`.
        core: makes the core from D.
        convolution: tokens that a causal convolution before the core sees (4 in Mamba); 0 leaves it out.
        normalise: whether what is read out is brought to unit root mean square.
    """

    def __init__(
        self,
        width: int,
        expand: float = 2.0,
        core: Callable[[int], Core] = GatedDiagonal,
        convolution: int = 0,
        normalise: bool = True,
    ) -> None:
        super().__init__(width, expand, core, None, StateDependence(False, False, False, False, normalise), convolution)

    def cost(self, time: int) -> Cost:
        return Cost(once=self.projection_flops() + self.core.flops())

    def states(self, x: Tensor, raw: Tensor) -> Tensor:
        gates, _ = self.gates_and_mixing(x, raw, None)
        return self.core.sequence_pass(gates, None)[0]

    def next_y(self, gates: Any, q: None, state: State) -> Tensor:
        return self.core.token_pass(gates, state.carry)[0]
