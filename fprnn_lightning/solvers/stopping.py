"""When an iteration has converged: its last relative change |f(y) - y| / |f(y)| is below a tolerance.

What is judged are *items*. A measure reduces a tensor to one number per item, and items are indexed by the leading axes
of the tensor: one per sequence by default; a sequence mixer may judge every prefix of a sequence for itself.

Source: Fixed-Point RNNs (arXiv 2503.10799), section 4.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stopping:
    """When to stop iterating, below the cap.

    Args:
        tolerance: relative change (largest change over largest value) below which an item has converged.
        share: share of the items that must have converged before a joint iteration stops; where every item stops
            for itself it plays no part.

    Raises:
        ValueError: if tolerance is negative or share not in (0, 1].
    """

    tolerance: float = 1e-2
    share: float = 0.75

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            raise ValueError(f"Stopping: tolerance is {self.tolerance}, must not be negative")
        if not 0 < self.share <= 1:
            raise ValueError(f"Stopping: share is {self.share}, must be above 0 and at most 1")


def change_per_sequence(change: Tensor, value: Tensor) -> Tensor:
    """The largest change of each sequence relative to its largest value: two (B, ...) -> (B,)."""
    return relative(change.abs().flatten(1).amax(1), value.abs().flatten(1).amax(1))


def relative(change: Tensor, size: Tensor) -> Tensor:
    """change / size, and 0 where nothing changes."""
    return change / size.clamp_min(torch.finfo(size.dtype).tiny)
