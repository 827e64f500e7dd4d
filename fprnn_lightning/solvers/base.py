"""Solving y = f(y): the one loop that every solver, stopping rule and gradient rule shares.

A solver proposes the next iterate from the current one and f of it; the loop measures, decides and counts. A solve that
does not converge is not an error: the solution says so, item by item.

Every decision stays on the device. An item that has settled keeps its iterate, so that evaluating f again gives what it
gave before: how often the host looks whether all have settled changes the time that a solve takes, and no number.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fprnn_lightning.solvers.items import SEQUENCES, Items, Measure
from fprnn_lightning.solvers.stopping import Share, Stopping, share_here

Function = Callable[[Tensor], Tensor]


class Solver(ABC):
    """How the next iterate is made; subclasses are frozen dataclasses without weights."""

    @abstractmethod
    def start(self, residual: Tensor, items: Items) -> Any:
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
    share: Share = share_here,
    items: Items = SEQUENCES,
    measure: Measure | None = None,
) -> Solution:
    """Iterates y towards f(y); what has settled ends as f of its last y.

    Args:
        function: f, from and to tensors shaped like `initial`.
        initial: the first y.
        solver: makes the next iterate.
        stopping: tolerance, and the share of items that ends a joint iteration.
        iterations: the most evaluations of f; 0 returns the initial value.
        independent: whether every item settles where it has converged, so that what becomes of it does not depend on
            the others; otherwise all settle when the share has converged.
        share: which share of the items has converged, of a joint iteration.
        items: what of y is judged together.
        measure: relative change of each item from y and f(y), where f has found it on the way; None computes it.
    """
    y, measure = initial, measure or items.change
    residual = initial.new_full(initial.shape[: items.axes], torch.inf)
    converged = settled = torch.zeros_like(residual, dtype=torch.bool)
    steps = torch.zeros_like(residual, dtype=torch.long)
    memory = solver.start(residual, items)
    look_every = 1 if _looking_is_free(initial) else stopping.look_every
    held: int | None = 0  # how many items have settled, if the host has looked
    for iteration in range(1, iterations + 1):
        f_y = function(y)
        with torch.no_grad():
            steps += ~settled
            residual = measure(y, f_y)
            converged = residual < stopping.tolerance
            settled = converged if independent else stopping.enough(converged, share).expand_as(converged)
        looks = iteration % look_every == 0
        held = int(settled.sum()) if looks else None
        if looks and items.all_settled(held == settled.numel()):
            return Solution(f_y, steps, residual, converged)
        proposed, memory = solver.propose(y, f_y, residual, memory)
        y = proposed if held == 0 else torch.where(over_items(settled, y), y, proposed)
    if held != 0:
        y = torch.where(over_items(settled, y), f_y, y)
    return Solution(y, steps, residual, converged)


def _looking_is_free(y: Tensor) -> bool:
    return y.device.type == "cpu"


def over_items(per_item: Tensor, y: Tensor) -> Tensor:
    """One number per item (leading axes of y) with axes to broadcast over y."""
    return per_item.reshape(per_item.shape + (1,) * (y.dim() - per_item.dim()))
