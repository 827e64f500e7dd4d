"""Anderson acceleration: by its definition, faster where that is to be had, and as causal as what it accelerates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fprnn_lightning.solvers import Stopping, solve
from fprnn_lightning.solvers.anderson import Anderson
from fprnn_lightning.solvers.items import PREFIXES, SEQUENCES
from fprnn_lightning.solvers.picard import Picard


def _symmetric_maps(largest: float, batch: int = 6, channels: int = 20):
    """y -> M y + b with eigenvalues of M between -largest and largest, and its fixed points."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(batch, channels, channels).double())[0]
    matrix = basis @ (torch.linspace(-largest, largest, channels).double()[:, None] * basis.mT)
    b = torch.randn(batch, channels).double()
    exact = torch.linalg.solve(torch.eye(channels).double() - matrix, b)
    return lambda y: (matrix.to(y) @ y[..., None])[..., 0] + b.to(y), exact


def _causal_map(batch: int = 3, time: int = 9, channels: int = 4):
    """A nonlinear f whose value at a token reads that token and those before it; at most `time` tokens."""
    torch.manual_seed(0)
    matrix, back = torch.randn(2, channels, channels).double() / channels**0.5
    x = torch.randn(batch, time, channels).double()

    def function(y):
        before = torch.nn.functional.pad(y, (0, 0, 1, -1))
        return torch.tanh(y @ (0.7 * matrix) + before @ back) + x[: len(y), : y.shape[1]]

    return function, torch.zeros_like(x)


@pytest.mark.parametrize("damping", [1.0, 0.6])
def test_an_iterate_is_the_combination_that_would_have_changed_least(damping):
    """Three iterations of the definition by least squares, sequence by sequence."""

    def function(y):
        seen.append(y)
        return f(y)

    f, exact = _symmetric_maps(0.9)
    seen = []
    solve(function, torch.zeros_like(exact), Anderson(2, damping, 1e-15), Stopping(0.0), 5)
    for n in (2, 3, 4):
        values = torch.stack([f(y) for y in seen[max(0, n - 3) : n]], -1)  # B D w+1
        changes = values - torch.stack(seen[max(0, n - 3) : n], -1)
        gamma = torch.linalg.lstsq(changes.diff(dim=-1), changes[..., -1:]).solution
        value, change = (each[..., -1:] - each.diff(dim=-1) @ gamma for each in (values, changes))
        torch.testing.assert_close(seen[n], (value - (1 - damping) * change)[..., 0], rtol=1e-6, atol=1e-6)


def test_a_window_of_all_dimensions_solves_a_linear_system():
    f, exact = _symmetric_maps(0.9, channels=4)
    value = solve(f, torch.zeros_like(exact), Anderson(4, regularisation=1e-14), Stopping(0.0), 6).value
    torch.testing.assert_close(value, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.double, 1e-8), (torch.float, 1e-5)])
@pytest.mark.parametrize("independent", [True, False])
def test_a_slow_contraction_takes_a_tenth_of_the_plain_iterations(dtype, tolerance, independent):
    f, exact = _symmetric_maps(0.99)
    plain, accelerated = (
        solve(f, torch.zeros_like(exact, dtype=dtype), solver, Stopping(tolerance, 1.0), 3000, independent=independent)
        for solver in (Picard(), Anderson())
    )
    assert plain.converged.all() and accelerated.converged.all()
    assert 10 * accelerated.steps.max() < plain.steps.max()
    bound = tolerance * exact.abs().max().item() * 20**0.5 / (1 - 0.99)
    torch.testing.assert_close(accelerated.value, exact.to(dtype), rtol=0, atol=bound)


@given(largest=st.floats(0.0, 0.98), window=st.integers(1, 7), damping=st.floats(0.5, 1.0), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_every_contraction_is_solved(largest, window, damping, seed):
    torch.manual_seed(seed)
    f, exact = _symmetric_maps(largest)
    start = 10 * torch.randn_like(exact)
    solution = solve(f, start, Anderson(window, damping), Stopping(1e-9, 1.0), 3000, independent=True)
    assert solution.converged.all()
    torch.testing.assert_close(solution.value, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("iterations", [1, 2, 5, 12])
def test_sequences_do_not_feel_their_neighbours(iterations):
    f, exact = _symmetric_maps(0.99)
    start, solver, stopping = torch.zeros_like(exact), Anderson(3), Stopping(0.0)
    together = solve(f, start, solver, stopping, iterations).value

    def alone(y):
        return f(y.expand(6, -1))[2:3]

    torch.testing.assert_close(solve(alone, start[2:3], solver, stopping, iterations).value, together[2:3])


@pytest.mark.parametrize("tolerance", [0.0, 1e-2])
@pytest.mark.parametrize("iterations", [1, 2, 5, 12, 40])
def test_prefixes_do_not_feel_later_tokens_or_neighbours(iterations, tolerance):
    f, start = _causal_map()

    def run(start, items):
        stopping = Stopping(tolerance)
        return solve(f, start, Anderson(3), stopping, iterations, independent=True, items=items)

    whole = run(start, PREFIXES)
    for time in (1, 4, 8):
        part = run(start[:2, :time], PREFIXES)
        torch.testing.assert_close(part.value, whole.value[:2, :time], rtol=1e-9, atol=1e-9)
        assert torch.equal(part.steps, whole.steps[:2, :time])
    if iterations == 5:  # with one set of coefficients for a sequence they would
        leaky = run(start, PREFIXES._replace(product=lambda a, b: (a * b).sum((1, 2))[:, None].expand(a.shape[:2])))
        assert (run(start[:, :4], PREFIXES).value - leaky.value[:, :4]).abs().max() > 1e-3


def test_prefixes_converge_to_the_fixed_point():
    f, start = _causal_map()
    solution = solve(f, start, Anderson(), Stopping(1e-10), 200, independent=True, items=PREFIXES)
    assert solution.converged.all()
    torch.testing.assert_close(f(solution.value), solution.value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("items", [SEQUENCES, PREFIXES], ids=["sequences", "prefixes"])
def test_a_singular_system_is_a_plain_step(items):
    """Constant maps, maps in steady motion, and one item of them among others: the differences are 0, or all alike."""
    start = torch.zeros(3, 5, 4).double()
    constant = solve(lambda y: torch.ones_like(y), start, Anderson(), Stopping(0.0), 6, items=items)
    assert torch.equal(constant.value, torch.ones_like(start))
    drift = torch.tensor([0.0, 1.0, 1e-300]).double()[:, None, None]
    drifting = solve(lambda y: y + drift, start, Anderson(), Stopping(0.0), 6, items=items)
    torch.testing.assert_close(drifting.value, (6 * drift).expand_as(start))


def test_an_overflow_is_a_plain_step():
    start = torch.zeros(2, 4).double()
    value = solve(lambda y: (1 - 1e-10) * y + 1e160, start, Anderson(), Stopping(0.0), 3).value
    torch.testing.assert_close(value, torch.full_like(value, 3e160))


def test_what_is_not_finite_in_one_item_stays_there():
    f, exact = _symmetric_maps(0.9)

    def broken(y):
        return torch.cat([f(y)[:5], y[5:] / 0])

    solution = solve(broken, torch.zeros_like(exact), Anderson(), Stopping(1e-9), 200, independent=True)
    assert solution.converged.tolist() == [True] * 5 + [False]
    torch.testing.assert_close(solution.value[:5], exact[:5], rtol=1e-6, atol=1e-6)


def test_a_chain_of_tokens_is_not_held_up_for_long():
    """Each token copies the one before, which plain steps solve in as many iterations as there are tokens."""
    first = torch.nn.functional.one_hot(torch.tensor([0]), 40).double()[..., None]  # 1 T 1

    def chain(y):
        return torch.nn.functional.pad(y, (0, 0, 1, -1)) + first

    solution = solve(chain, torch.zeros_like(first), Anderson(), Stopping(1e-6, 1.0), 400)
    assert solution.converged.all() and solution.steps.max() <= 3 * 40
    torch.testing.assert_close(solution.value, torch.ones_like(first), rtol=1e-4, atol=1e-4)


def test_an_expansive_map_is_reported_not_raised():
    solution = solve(lambda y: 1 - 5 * y.abs().exp(), torch.zeros(2, 3).double(), Anderson(), Stopping(), 50)
    assert not solution.converged.any() and (solution.steps == 50).all()


@pytest.mark.parametrize("options", [{"window": 0}, {"damping": 0.0}, {"damping": 1.1}, {"regularisation": 0.0}])
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=f"Anderson: {next(iter(options))} is .*, (must be|not)"):
        Anderson(**options)
