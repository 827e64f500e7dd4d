"""The loop and its solver on maps whose fixed point is known: f(y) = y at the end, at the rate the theory gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fprnn_lightning.solvers import Stopping, base, solve
from fprnn_lightning.solvers.anderson import Anderson
from fprnn_lightning.solvers.items import SEQUENCES
from fprnn_lightning.solvers.picard import Picard


def _linear_maps(radius: float, batch: int = 6, channels: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    orthogonal = torch.linalg.qr(torch.randn(batch, channels, channels, dtype=torch.double))[0]
    return radius * orthogonal, torch.randn(batch, channels, dtype=torch.double)


def _apply(matrix: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (matrix @ y[..., None])[..., 0]


def test_the_solution_is_a_fixed_point_and_says_how_it_got_there():
    torch.manual_seed(0)
    matrix, b = _linear_maps(0.5)
    solution = solve(lambda y: _apply(matrix, y) + b, torch.zeros_like(b), Picard(), Stopping(1e-10, 1.0), 100)
    torch.testing.assert_close(_apply(matrix, solution.value) + b, solution.value, rtol=1e-9, atol=1e-9)
    assert solution.converged.all() and (solution.residual < 1e-10).all()
    assert (solution.steps == solution.steps[0]).all() and 25 < solution.steps[0] < 45


@given(radius=st.floats(0.1, 0.9), seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_the_error_falls_at_the_contraction_rate(radius, seed):
    torch.manual_seed(seed)
    matrix, b = _linear_maps(radius)
    exact = torch.linalg.solve(torch.eye(5, dtype=torch.double) - matrix, b)
    for iterations in (1, 4, 9):
        value = solve(lambda y: _apply(matrix, y) + b, torch.zeros_like(b), Picard(), Stopping(0.0), iterations).value
        error = (value - exact).norm(dim=1) / exact.norm(dim=1)
        torch.testing.assert_close(error, torch.full_like(error, radius**iterations), rtol=1e-6, atol=1e-12)


def test_the_cap_holds_and_a_failure_is_reported():
    matrix, b = _linear_maps(1.5)
    solution = solve(lambda y: _apply(matrix, y) + b, torch.zeros_like(b), Picard(factor=1.0), Stopping(1e-3), 7)
    assert (solution.steps == 7).all() and not solution.converged.any()


@pytest.mark.parametrize("independent", [True, False])
def test_it_goes_on_while_there_are_items_elsewhere_and_those_here_stay(independent):
    asked = []

    def all_settled(here: bool) -> bool:
        asked.append(here)
        return here and len(asked) >= 60

    torch.manual_seed(0)
    matrix, b = _linear_maps(0.5)
    arguments = (lambda y: _apply(matrix, y) + b, torch.zeros_like(b), Picard(), Stopping(1e-10, 1.0), 100)
    alone = solve(*arguments, independent=independent)
    beside = solve(*arguments, independent=independent, items=SEQUENCES._replace(all_settled=all_settled))
    assert len(asked) == 60 and asked.index(True) == alone.steps.max() - 1
    assert torch.equal(beside.value, alone.value) and torch.equal(beside.steps, alone.steps)


def test_no_iterations_return_the_initial_value():
    y = torch.randn(3, 2)
    solution = solve(lambda y: y + 1, y, Picard(), Stopping(), 0)
    assert torch.equal(solution.value, y) and (solution.steps == 0).all() and not solution.converged.any()


def test_independent_items_do_not_feel_their_neighbours():
    torch.manual_seed(0)
    matrix, b = _linear_maps(1.0)
    matrix *= torch.linspace(0.1, 0.9, 6, dtype=torch.double)[:, None, None]

    def run(rows):
        return solve(
            lambda y: _apply(matrix[rows], y) + b[rows],
            torch.zeros_like(b[rows]), Picard(), Stopping(1e-4), 200, independent=True,
        )  # fmt: skip

    together, steps = run(slice(None)), []
    for row in range(6):
        alone = run(slice(row, row + 1))
        assert torch.equal(alone.value[0], together.value[row]) and alone.residual[0] == together.residual[row]
        steps.append(alone.steps.item())
    assert together.steps.tolist() == steps and steps == sorted(steps) and steps[0] < steps[-1]


def test_an_item_that_has_converged_stays_and_is_what_it_says():
    """One that only seems to have, while those before it still move, goes on: here item 1 waits for item 0."""

    def chain(y):
        return torch.stack([0.9 * y[:, 0] + 1, 0.1 * y[:, 1] + y[:, 0]], 1)

    def by_prefix(y, f_y):
        return ((f_y - y).abs() / f_y.abs()).cummax(1).values

    solution = solve(
        chain,
        torch.zeros(1, 2).double(),
        Picard(),
        Stopping(1e-3),
        200,
        independent=True,
        items=SEQUENCES._replace(axes=2, change=by_prefix),
    )
    assert solution.converged.all() and solution.steps.max() < 200
    assert (by_prefix(solution.value, chain(solution.value)) < 1e-3).all()


def test_a_joint_iteration_stops_at_the_share():
    radii = torch.tensor([0.1, 0.1, 0.1, 0.99]).double()[:, None]
    solution = solve(lambda y: radii * y + 1, torch.zeros(4, 1).double(), Picard(), Stopping(1e-3, 0.75), 100)
    assert solution.converged.tolist() == [True, True, True, False] and solution.steps[0] < 10


def test_the_current_residual_is_judged_not_the_smallest_ever():
    values = iter([1.0, 1.001, 5.0, 9.0])
    solution = solve(lambda y: torch.full_like(y, next(values)), torch.zeros(1, 1), Picard(), Stopping(1e-4), 4)
    assert not solution.converged and solution.residual > 0.4


def test_damping_rescues_an_oscillation():
    def oscillating(y):
        return 1 - 1.2 * y

    start, stopping = torch.zeros(1, 1).double(), Stopping(1e-6)
    plain = solve(oscillating, start, Picard(factor=1.0), stopping, 400)
    damped = solve(oscillating, start, Picard(factor=0.9, patience=3), stopping, 400)
    assert not plain.converged and damped.converged
    torch.testing.assert_close(damped.value, torch.full((1, 1), 1 / 2.2).double(), rtol=1e-5, atol=0)


def test_damping_follows_the_published_rule():
    """Of an expansive map, iterate by iterate: delta times 0.5 whenever two residuals in a row are no new minimum."""

    def function(y):
        seen.append(y.item())
        return 1 - 3 * y

    seen, y, delta, smallest, stalled = [], 0.0, 1.0, float("inf"), 0
    solve(function, torch.zeros(1, 1).double(), Picard(factor=0.5, patience=2), Stopping(0.0), 12)
    for found in seen:
        assert found == pytest.approx(y)
        f_y = 1 - 3 * y
        residual = abs(f_y - y) / abs(f_y)
        stalled = 0 if residual < smallest else stalled + 1
        smallest = min(smallest, residual)
        if stalled == 2:
            delta, stalled = 0.5 * delta, 0
        y += delta * (f_y - y)
    assert delta < 1


def _watched(values, stopping, **options):
    """The y that f was given, the f(y) that it returned, and the pairs that were measured."""

    def function(y):
        given.append(y)
        returned.append(next(values))
        return returned[-1]

    def measure(y, f_y):
        measured.append((y, f_y))
        return SEQUENCES.change(y, f_y)

    given, returned, measured = [], [], []
    solution = solve(function, torch.zeros(2, 3), Picard(**options), stopping, 20, measure=measure)
    return solution, given, returned, measured


def test_undamped_what_f_returned_is_passed_on_itself():
    solution, given, returned, measured = _watched(
        (torch.full((2, 3), 1 - 0.1**n) for n in range(1, 20)), Stopping(1e-4)
    )
    assert len(given) > 4 and solution.value is returned[-1]
    assert all(y is f_y for y, f_y in zip(given[1:], returned, strict=False))
    assert all(y is g and f_y is r for (y, f_y), g, r in zip(measured, given, returned, strict=True))


@pytest.mark.parametrize("solver", [Picard(), Picard(0.7, 0.8, 2), Anderson(3, 0.9)], ids=str)
@pytest.mark.parametrize("independent", [True, False])
@pytest.mark.parametrize("iterations", [3, 17, 200])
def test_how_often_the_host_looks_changes_no_number(solver, independent, iterations, monkeypatch):
    torch.manual_seed(0)
    matrix, b = _linear_maps(1.0)
    matrix *= torch.linspace(0.1, 0.9, 6, dtype=torch.double)[:, None, None]
    b.requires_grad_()

    def run(look_every):
        stopping = Stopping(1e-4, 0.5, look_every)
        found = solve(
            lambda y: _apply(matrix, y) + b, torch.zeros_like(b), solver, stopping, iterations, independent=independent
        )
        return found, torch.autograd.grad(found.value.sin().sum(), b)[0]

    plain, gradient = run(1)
    monkeypatch.setattr(base, "_looking_is_free", lambda y: False)
    for look_every in (1, 2, 3, 7, 1000):
        found, its_gradient = run(look_every)
        for name in ("value", "steps", "residual", "converged"):
            assert torch.equal(getattr(found, name), getattr(plain, name)), (look_every, name)
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-12, atol=1e-12)


class _HostReads(TorchDispatchMode):
    """Counts how often the host waits for a number."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("solver", [Picard(), Anderson(3, 0.9)], ids=str)
@pytest.mark.parametrize("independent", [True, False])
def test_the_host_waits_every_few_iterations_only(solver, independent, monkeypatch):
    monkeypatch.setattr(base, "_looking_is_free", lambda y: False)
    with _HostReads() as reads:
        matrix, b = _linear_maps(0.9)
        solve(
            lambda y: _apply(matrix, y) + b,
            torch.zeros_like(b), solver, Stopping(0.0, look_every=5), 18, independent=independent,
        )  # fmt: skip
    assert reads.count == 3


def test_settings_out_of_range_are_refused():
    for make in (
        lambda: Picard(damping=0.0), lambda: Picard(factor=1.5), lambda: Picard(patience=0),
        lambda: Stopping(tolerance=-1.0), lambda: Stopping(share=0.0), lambda: Stopping(look_every=0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must"):
            make()
