"""Anderson acceleration (type II): the next iterate is the combination of the last ones that would have changed least.

With the change r = f(y) - y, and the differences R_j of r and F_j of f(y) between the last window + 1 iterations,

    y <- f(y) - sum_j gamma_j F_j - (1 - damping) (r - sum_j gamma_j R_j),    gamma = argmin |r - sum_j gamma_j R_j|^2.

Every item has a gamma of its own, from inner products over that item alone: G gamma = (<R_i, r>), G = (<R_i, R_j>),
scaled to a unit diagonal, ridge regularised and solved by Cholesky. Where items are prefixes, the product at token t is
a sum over the tokens up to t, a cumulative sum over time; the gamma_t made from it moves token t alone, and the token's
next value is made from its own last values. So the accelerated iteration is as causal as f, and its outputs on a prefix
are those on the prefix alone. (Products over token t alone would be causal too, but neighbours that are combined
differently disturb each other: that took two to four times the iterations of a plain solve.)

The first step is plain, and an item whose change has not fallen forgets all differences but the last. What is still on
its way from token to token, a plain step passes on and a combination of past ones delays. So this pays where a token's
own system converges slowly, and not where there are just many tokens. To the gradient of `Unrolled` gamma is constant.

Source: Anderson 1965; Walker and Ni 2011 (doi 10.1137/10078356X), the unconstrained form with differences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fprnn_lightning.solvers.base import Solver, over_items
from fprnn_lightning.solvers.items import Items, Measure


class _Memory(NamedTuple):
    """The inner product; f(y), its change and residual last time; differences, oldest first, and products of those."""

    product: Measure
    last: tuple[Tensor, Tensor] | None
    residual: Tensor
    value_differences: tuple[Tensor, ...]
    change_differences: tuple[Tensor, ...]
    gram: Tensor  # items, W differences, W differences; 0 where an item has forgotten


@dataclass(frozen=True)
class Anderson(Solver):
    """Combines the last iterates so that they would have changed least; memory of 2 window + 2 of them.

    Args:
        window: differences between iterates that are combined.
        damping: share of the change that remains which is gone, in (0, 1]; 1 is undamped.
        regularisation: ridge on the scaled system, as a share of its diagonal.

    Raises:
        ValueError: if window is less than 1, damping not in (0, 1], or regularisation not positive.
    """

    window: int = 5
    damping: float = 1.0
    regularisation: float = 1e-6

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"Anderson: window is {self.window}, must be at least 1")
        if not 0 < self.damping <= 1:
            raise ValueError(f"Anderson: damping is {self.damping}, must be above 0 and at most 1")
        if not self.regularisation > 0:
            raise ValueError(f"Anderson: regularisation is {self.regularisation}, must be above 0")

    def start(self, residual: Tensor, items: Items) -> _Memory:
        return _Memory(items.product, None, residual, (), (), residual.new_empty(*residual.shape, 0, 0))

    def propose(self, y: Tensor, f_y: Tensor, residual: Tensor, memory: _Memory) -> tuple[Tensor, _Memory]:
        change = f_y - y
        memory = self._remember(f_y, change, residual, memory)
        weights = self._weights(change, memory) if memory.change_differences else ()
        proposed = _subtract(f_y, weights, memory.value_differences)
        if self.damping < 1:
            proposed = proposed - (1 - self.damping) * _subtract(change, weights, memory.change_differences)
        return proposed, memory

    def _remember(self, f_y: Tensor, change: Tensor, residual: Tensor, memory: _Memory) -> _Memory:
        product, last, last_residual, values, changes, gram = memory
        if last is not None:
            values = (*values, f_y - last[0])[-self.window :]
            changes = (*changes, change - last[1])[-self.window :]
            with torch.no_grad():
                gram = torch.where((residual < last_residual)[..., None, None], gram, 0)
                gram = functional.pad(gram, (0, 1, 0, 1))[..., -self.window :, -self.window :]
                gram[..., -1] = gram[..., -1, :] = torch.stack([product(each, changes[-1]) for each in changes], -1)
        return _Memory(product, (f_y, change), residual, values, changes, gram)

    @torch.no_grad()
    def _weights(self, change: Tensor, memory: _Memory) -> Sequence[Tensor]:
        """gamma of every difference, each shaped like the items; 0 where it is forgotten or the system is singular."""
        diagonal = memory.gram.diagonal(dim1=-2, dim2=-1)
        scale = torch.where(diagonal > 0, diagonal.rsqrt(), 0)
        right = scale * torch.stack([memory.product(each, change) for each in memory.change_differences], -1)
        ridge = self.regularisation * torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
        factor, failed = torch.linalg.cholesky_ex(scale[..., None] * memory.gram * scale[..., None, :] + ridge)
        weights = scale * torch.cholesky_solve(right[..., None], factor)[..., 0]
        return torch.where((failed == 0)[..., None] & weights.isfinite(), weights, 0).unbind(-1)


def _subtract(total: Tensor, weights: Sequence[Tensor], differences: Sequence[Tensor]) -> Tensor:
    """total - sum_j weights_j differences_j, with a weight for each item."""
    for weight, difference in zip(weights, differences, strict=True):
        total = torch.addcmul(total, over_items(weight, total), difference, value=-1)
    return total
