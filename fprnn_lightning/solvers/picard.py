"""Picard iteration with adaptive damping: y <- y + delta (f(y) - y).

delta starts at `damping` and is multiplied by `factor` for an item whose residual has set no new minimum for `patience`
iterations. Undamped, causal maps converge token after token, so damping helps only where a token's own system diverges.

Source: Fixed-Point RNNs (arXiv 2503.10799), section 4.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fprnn_lightning.solvers.base import Solver, over_items
from fprnn_lightning.solvers.items import Items


class _Memory(NamedTuple):
    """Iterations so far; per item: step length delta, smallest residual so far, iterations since it was set."""

    iterations: int
    delta: Tensor
    smallest: Tensor
    stalled: Tensor


@dataclass(frozen=True)
class Picard(Solver):
    """Damped repetition of f.

    Args:
        damping: share delta of the way to f(y) that is gone at first, in (0, 1]; 1 is undamped.
        factor: what delta is multiplied by when the residual has stopped falling; 1 keeps it.
        patience: iterations without a new smallest residual before that.

    Raises:
        ValueError: if damping or factor is not in (0, 1], or patience less than 1.
    """

    damping: float = 1.0
    factor: float = 0.9
    patience: int = 15

    def __post_init__(self) -> None:
        if not (0 < self.damping <= 1 and 0 < self.factor <= 1):
            raise ValueError(f"Picard: damping {self.damping} and factor {self.factor} must be above 0 and at most 1")
        if self.patience < 1:
            raise ValueError(f"Picard: patience is {self.patience}, must be at least 1")

    def start(self, residual: Tensor, items: Items) -> _Memory:
        return _Memory(0, torch.full_like(residual, self.damping), residual, torch.zeros_like(residual))

    def propose(self, y: Tensor, f_y: Tensor, residual: Tensor, memory: _Memory) -> tuple[Tensor, _Memory]:
        stalled = torch.where(residual < memory.smallest, 0, memory.stalled + 1)
        impatient = stalled >= self.patience
        delta = torch.where(impatient, memory.delta * self.factor, memory.delta)
        smallest, stalled = torch.minimum(memory.smallest, residual), torch.where(impatient, 0, stalled)
        undamped = self.damping == 1 and memory.iterations < self.patience  # nobody can have lost patience yet
        memory = _Memory(memory.iterations + 1, delta, smallest, stalled)
        return f_y if undamped else torch.lerp(y, f_y, over_items(delta, y)), memory
