"""When an iteration has converged: its last relative change |f(y) - y| / |f(y)| is below a tolerance.

A joint iteration stops when a share of its items has converged. In training on several ranks that is the share of the
whole batch, so that all ranks do as many iterations as one rank with the whole batch: `share_on_all_ranks`. It must
then be asked as often on all of them, which it is as all stop together.

Source: Fixed-Point RNNs (arXiv 2503.10799), section 4.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

Share = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Stopping:
    """When to stop iterating, below the cap.

    Args:
        tolerance: relative change (largest change over largest value) below which an item has converged.
        share: share of the items that must have converged before a joint iteration stops; where every item stops
            for itself it plays no part.
        look_every: iterations on a GPU between two looks of the host whether to go on, for each of which it waits. It
            changes no number. On a CPU, where looking is free, the host looks after every iteration.

    Raises:
        ValueError: if tolerance is negative, share not in (0, 1], or look_every less than 1.
    """

    tolerance: float = 1e-2
    share: float = 0.75
    look_every: int = 4

    def __post_init__(self) -> None:
        if self.tolerance < 0:
            raise ValueError(f"Stopping: tolerance is {self.tolerance}, must not be negative")
        if not 0 < self.share <= 1:
            raise ValueError(f"Stopping: share is {self.share}, must be above 0 and at most 1")
        if self.look_every < 1:
            raise ValueError(f"Stopping: look_every is {self.look_every}, must be at least 1")

    def enough(self, converged: Tensor, share: Share) -> Tensor:
        """Whether the share of the items has converged, as a tensor for which the host does not wait."""
        return share(converged) >= self.share


def share_here(converged: Tensor) -> Tensor:
    """The share of the items of this process that has converged: a scalar."""
    return converged.float().mean()


def share_on_all_ranks(converged: Tensor) -> Tensor:
    """The share of the items of all ranks that has converged; where there is one process only, of its items."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return share_here(converged)
    counts = torch.stack([converged.sum(), converged.new_tensor(converged.numel(), dtype=torch.long)])
    distributed.all_reduce(counts)
    return counts[0] / counts[1]
