"""Gradient rules on a fixed point with a known gradient."""

from functools import partial

import pytest
import torch

from fprnn_lightning.solvers import Stopping, solve
from fprnn_lightning.solvers.gradients import Implicit, OneStep, Unrolled
from fprnn_lightning.solvers.picard import Picard

FIND = partial(solve, solver=Picard(), stopping=Stopping(1e-13, 1.0))


@pytest.fixture
def problem():
    torch.manual_seed(0)
    weight = (0.2 * torch.randn(5, 5, dtype=torch.double)).requires_grad_()
    return weight, torch.randn(4, 5, dtype=torch.double, requires_grad=True)


def _gradients(rule, weight, b):
    solution = rule.differentiate(FIND, lambda y: torch.tanh(y @ weight.T + b), torch.zeros_like(b), 200)
    return solution, torch.autograd.grad(solution.value.pow(3).sum(), (weight, b))


@pytest.mark.parametrize("rule", [Implicit(200, 1e-14), Unrolled()])
def test_implicit_and_unrolled_are_finite_differences(rule, problem):
    def fixed_point(weight, b):
        return rule.differentiate(FIND, lambda y: torch.tanh(y @ weight.T + b), torch.zeros_like(b), 200).value

    assert torch.autograd.gradcheck(fixed_point, problem, eps=1e-5, atol=1e-7)


def test_implicit_equals_unrolled(problem):
    (found, implicit), (_, unrolled) = _gradients(Implicit(200, 1e-14), *problem), _gradients(Unrolled(), *problem)
    torch.testing.assert_close(implicit, unrolled)
    assert found.converged.all()


def test_one_step_is_the_product_with_the_jacobian_of_one_step(problem):
    weight, b = problem
    solution, gradients = _gradients(OneStep(), weight, b)
    y = solution.value.detach()
    expected = torch.autograd.grad(torch.tanh(y @ weight.T + b), (weight, b), 3 * y**2)
    torch.testing.assert_close(gradients, expected)
    assert (_gradients(Unrolled(), weight, b)[1][0] - gradients[0]).abs().max() > 1e-3


@pytest.mark.parametrize("rule", [OneStep(), Implicit(), Unrolled()])
def test_the_cap_counts_the_recorded_step(rule, problem):
    calls = []

    def function(y):
        calls.append(1)
        return y * 0.5 + 1

    rule.differentiate(FIND, function, torch.zeros(1, 1), 5)
    assert len(calls) == 5


def test_a_mistaken_cap_is_refused():
    with pytest.raises(ValueError, match="iterations is 0, must be at least 1"):
        Implicit(iterations=0)
