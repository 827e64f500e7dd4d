"""Gradient rules on a fixed point with a known gradient."""

from functools import partial

import pytest
import torch

from fprnn_lightning.solvers import Stopping, solve
from fprnn_lightning.solvers.anderson import Anderson
from fprnn_lightning.solvers.gradients import Implicit, OneStep, Unrolled
from fprnn_lightning.solvers.picard import Picard

STOPPING = Stopping(1e-13, 1.0)
SOLVERS = [Picard(), Anderson(3)]


def telling(on_solution):
    """`solve`, which tells of every solution."""

    def solve_and_tell(*arguments):
        solution = solve(*arguments)
        on_solution(solution)
        return solution

    return solve_and_tell


def _differentiated(rule, weight, b, solver=SOLVERS[0], on_adjoint=lambda solution: None, iterations=200):
    find = partial(solve, solver=solver, stopping=STOPPING)
    return rule.differentiate(
        find, lambda y: torch.tanh(y @ weight.T + b), torch.zeros_like(b), iterations, telling(on_adjoint)
    )


@pytest.fixture
def problem():
    torch.manual_seed(0)
    weight = (0.3 * torch.randn(3, 3, dtype=torch.double)).requires_grad_()
    return weight, torch.randn(2, 3, dtype=torch.double, requires_grad=True)


def _gradients(rule, weight, b, solver=SOLVERS[0]):
    solution = _differentiated(rule, weight, b, solver)
    return solution, torch.autograd.grad(solution.value.pow(3).sum(), (weight, b))


@pytest.mark.parametrize(
    ("rule", "solver"),
    [(Implicit(200, 1e-14), SOLVERS[0]), (Implicit(200, 1e-14), SOLVERS[1]), (Unrolled(), SOLVERS[0])],
)
def test_implicit_and_unrolled_are_finite_differences(rule, solver, problem):
    def fixed_point(weight, b):
        return _differentiated(rule, weight, b, solver).value

    assert torch.autograd.gradcheck(fixed_point, problem, eps=1e-5, atol=1e-7)


@pytest.mark.parametrize("solver", SOLVERS)
def test_implicit_equals_unrolled(solver, problem):
    found, implicit = _gradients(Implicit(200, 1e-14), *problem, solver)
    torch.testing.assert_close(implicit, _gradients(Unrolled(), *problem)[1])
    assert found.converged.all()


def test_unrolled_anderson_comes_near(problem):
    """Its combinations are constants to the gradient, whose iteration they accelerate less than that of the value."""
    exact, near = _gradients(Implicit(200, 1e-14), *problem)[1], _gradients(Unrolled(), *problem, SOLVERS[1])[1]
    torch.testing.assert_close(near, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("solver", [*SOLVERS, Picard(damping=0.5)])
def test_one_step_is_the_product_with_the_jacobian_of_one_step(solver, problem):
    weight, b = problem
    solution, gradients = _gradients(OneStep(), weight, b, solver)
    y = solution.value.detach()
    expected = torch.autograd.grad(torch.tanh(y @ weight.T + b), (weight, b), 3 * y**2)
    torch.testing.assert_close(gradients, expected)
    assert (_gradients(Unrolled(), weight, b)[1][0] - gradients[0]).abs().max() > 1e-3


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("rule", [OneStep(), Implicit(), Unrolled()])
def test_the_cap_counts_the_recorded_step(rule, solver):
    calls = []

    def function(y):
        calls.append(1)
        return y * 0.5 + 1

    find = partial(solve, solver=solver, stopping=Stopping(0.0))
    for iterations in (1, 5):
        calls.clear()
        rule.differentiate(find, function, torch.zeros(1, 1), iterations, telling(print))
        assert len(calls) == iterations


def test_how_far_a_gradient_got_is_told_in_every_backward(problem):
    weight, b = problem
    told = []
    value = _differentiated(Implicit(200, 1e-10), weight, b, on_adjoint=told.append).value
    assert told == []
    for backward in (1, 2):
        value.sum().backward(retain_graph=True)
        assert len(told) == backward
        assert told[-1].converged.all() and (told[-1].residual < 1e-10).all() and told[-1].steps.shape == (2,)
    _differentiated(Implicit(3, 1e-10), weight, b, on_adjoint=told.append).value.sum().backward()
    assert not told[-1].converged.any() and (told[-1].steps == 3).all() and (told[-1].residual > 1e-10).all()


def test_an_adjoint_that_diverges_is_told_although_the_value_has_converged():
    """At the fixed point 0 of y -> 3 y an iteration that starts there stays there, and its gradient grows."""
    told = []
    y = torch.zeros(2, 3, requires_grad=True)
    scale = torch.full((), 3.0, requires_grad=True)
    find = partial(solve, solver=Picard(), stopping=STOPPING)
    found = Implicit(20).differentiate(find, lambda y: scale * y, y, 20, telling(told.append))
    assert found.converged.all()
    found.value.sum().backward()
    assert not told[0].converged.any() and (told[0].residual > 0.5).all()


def test_the_memory_of_one_step_does_not_grow_with_the_iterations(problem):
    """In bytes saved for backward, each storage counted once."""
    stopping = Stopping(0.0)

    def saved(rule, solver, iterations):
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            kept.append(tensor)
            return tensor

        kept = []
        weight, b = problem
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            find = partial(solve, solver=solver, stopping=stopping)
            rule.differentiate(
                find, lambda y: torch.tanh(y @ weight.T + b), torch.zeros_like(b), iterations, telling(print)
            )
        return sum(storages.values())

    for solver in SOLVERS:
        for rule in (OneStep(), Implicit()):
            once, *more = (saved(rule, solver, iterations) for iterations in (2, 8, 32))
            assert once > 0 and more == [once, once]
        few, some, many = (saved(Unrolled(), solver, iterations) for iterations in (2, 8, 32))
        assert 2 * few < some and 3 * some < many


def test_a_mistaken_cap_is_refused():
    with pytest.raises(ValueError, match="iterations is 0, must be at least 1"):
        Implicit(iterations=0)
