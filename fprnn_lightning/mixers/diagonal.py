"""The diagonal mixer: one pass of its core, Q = I, and nothing reads the state. With `GatedDiagonal` it is LRU-like."""

from collections.abc import Callable

from torch import Tensor

from fprnn_lightning.cores import Core
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.mixers.recurrent import RecurrentMixer, StateDependence


class DiagonalMixer(RecurrentMixer):
    """A diagonal linear RNN: one parallel pass over time.

    Args:
        width: channels of the input and of the output.
        expand: channels D of the core per channel of `width`.
        core: makes the core from D.
    """

    def __init__(self, width: int, expand: float = 2.0, core: Callable[[int], Core] = GatedDiagonal) -> None:
        super().__init__(width, expand, core, None, StateDependence(False, False, False, False))

    def states(self, x: Tensor, raw: Tensor) -> Tensor:
        gates, _ = self.gates_and_mixing(x, raw, None)
        return self.core.sequence_pass(gates, gates.value)

    def next_state(self, x: Tensor, raw: Tensor, state: Tensor) -> Tensor:
        gates, _ = self.gates_and_mixing(x, raw, None)
        offset, gain = self.core.token_pass(gates, state)
        return offset + gain * gates.value
