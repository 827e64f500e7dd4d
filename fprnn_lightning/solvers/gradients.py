"""Gradient rules: what backpropagation sees of a fixed point y = f(y, theta), whose true gradient is

    dL/dtheta = g^T df/dtheta,    g = dL/dy + (df/dy)^T g.

`OneStep` takes g = dL/dy, `Implicit` solves for g by vector-Jacobian products, `Unrolled` differentiates the iteration.

Source: Fixed-Point RNNs (arXiv 2503.10799), theorem 3.2; implicit: Bai, Kolter and Koltun 2019 (arXiv 1909.01377).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fprnn_lightning.solvers.base import Function, Solution, solve
from fprnn_lightning.solvers.picard import Picard
from fprnn_lightning.solvers.stopping import Stopping

Find = Callable[..., Solution]


class GradientRule(ABC):
    """How a solve is recorded for backpropagation; subclasses are frozen dataclasses without weights.

    A rule may record one more step at what was found, so where a solve has not converged the value with gradients is
    one step beyond the value without, and the report is of the step before.
    """

    @abstractmethod
    def differentiate(
        self, find: Find, function: Function, initial: Tensor, iterations: int, solve_adjoint: Find = solve
    ) -> Solution:
        """What `find(function, initial, iterations=...)` finds within so many steps, with this rule's gradient.

        A rule that solves for its gradient does so by `solve_adjoint`, which is called as `solve` in every backward.
        """


@dataclass(frozen=True)
class Unrolled(GradientRule):
    """The gradient of the iteration itself; its memory grows with the iterations."""

    def differentiate(
        self, find: Find, function: Function, initial: Tensor, iterations: int, solve_adjoint: Find = solve
    ) -> Solution:
        return find(function, initial, iterations=iterations)


@dataclass(frozen=True)
class OneStep(GradientRule):
    """The gradient of the last step alone, the paper's: cheap, and not the true gradient."""

    def differentiate(
        self, find: Find, function: Function, initial: Tensor, iterations: int, solve_adjoint: Find = solve
    ) -> Solution:
        with torch.no_grad():
            found = find(function, initial, iterations=iterations - 1)
        return replace(found, value=function(found.value), steps=found.steps + 1)


@dataclass(frozen=True)
class Implicit(GradientRule):
    """The true gradient at the fixed point, by iterating the adjoint equation; memory of one step. Once differentiable.

    Args:
        iterations: the most vector-Jacobian products.
        tolerance: relative change of g below which a sequence has converged; all must.

    Raises:
        ValueError: if iterations is less than 1.
    """

    iterations: int = 64
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"Implicit: iterations is {self.iterations}, must be at least 1")

    def differentiate(
        self, find: Find, function: Function, initial: Tensor, iterations: int, solve_adjoint: Find = solve
    ) -> Solution:
        with torch.no_grad():
            found = find(function, initial, iterations=iterations - 1)
        y = found.value.detach().requires_grad_()
        f_y = function(y)
        stopping = Stopping(self.tolerance, share=1.0)

        def adjoint(grad: Tensor) -> Tensor:
            def step(g: Tensor) -> Tensor:
                return grad + torch.autograd.grad(f_y, y, g, retain_graph=True)[0]

            return solve_adjoint(step, grad, Picard(), stopping, self.iterations).value

        return replace(found, value=_WithAdjoint.apply(f_y, adjoint), steps=found.steps + 1)


class _WithAdjoint(torch.autograd.Function):
    """The identity, whose gradient goes through a function of it."""

    @staticmethod
    def forward(ctx, value: Tensor, adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.adjoint = adjoint
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.adjoint(grad), None
