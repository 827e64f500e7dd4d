"""Solving y = f(y): the one loop that every solver, stopping rule and gradient rule shares.

A solver proposes the next iterate from the current one and f of it; the loop measures, decides and counts. A solve that
does not converge is not an error: the solution says so, item by item.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fprnn_lightning.solvers.stopping import Stopping, change_per_sequence

Function = Callable[[Tensor], Tensor]
Measure = Callable[[Tensor, Tensor], Tensor]


class Solver(ABC):
    """How the next iterate is made; subclasses are frozen dataclasses without weights."""

    @abstractmethod
    def start(self, residual: Tensor) -> Any:
        """What the solver remembers before the first iteration; `residual` (items) tells shape and device."""

    @abstractmethod
    def propose(self, y: Tensor, f_y: Tensor, residual: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """The next iterate and the new memory, from y, f(y) and the relative change of each item."""


@dataclass(frozen=True)
class Solution:
    """The last iterate, and how far it got.

    Args:
        value: the iterate, shaped like the initial one.
        steps: evaluations of f that went into each item.
        residual: relative change of each item in its last iteration.
        converged: whether that is below the tolerance.
    """

    value: Tensor
    steps: Tensor
    residual: Tensor
    converged: Tensor


def solve(
    function: Function,
    initial: Tensor,
    solver: Solver,
    stopping: Stopping,
    iterations: int,
    *,
    independent: bool = False,
    measure: Measure = change_per_sequence,
) -> Solution:
    """Iterates y towards f(y).

    Args:
        function: f, from and to tensors shaped like `initial`.
        initial: the first y.
        solver: makes the next iterate.
        stopping: tolerance, and the share of items that ends a joint iteration.
        iterations: the most evaluations of f; 0 returns the initial value.
        independent: whether every item stays where it has converged, so that what becomes of it does not depend on
            the others; otherwise all go on until the share has converged.
        measure: relative change of each item, from f(y) - y and f(y).
    """
    y = initial
    residual = torch.full_like(measure(initial, initial), torch.inf)
    steps = torch.zeros_like(residual, dtype=torch.long)
    converged = torch.zeros_like(residual, dtype=torch.bool)
    memory = solver.start(residual)
    for _ in range(iterations):
        f_y = function(y)
        with torch.no_grad():
            steps += ~converged if independent else 1
            residual = measure(f_y - y, f_y)
            converged = residual < stopping.tolerance
        proposed, memory = solver.propose(y, f_y, residual, memory)
        if independent:
            y = torch.where(_over_items(converged, y), y, proposed)
            done = converged.all()
        else:
            y = proposed
            done = converged.float().mean() >= stopping.share
        if done:
            break
    if independent and iterations:
        y = torch.where(_over_items(converged, y), f_y, y)
    return Solution(y, steps, residual, converged)


def _over_items(mask: Tensor, y: Tensor) -> Tensor:
    """A mask of items (leading axes of y) with axes to broadcast over y."""
    return mask.reshape(mask.shape + (1,) * (y.dim() - mask.dim()))
