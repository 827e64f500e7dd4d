"""The exact limits of the theory: Q = I is the diagonal RNN, the converged iteration is the dense RNN."""

from itertools import product

import pytest
import torch

from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.channel_mixers.orthogonal import Orthogonal
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.recurrent import StateDependence
from fprnn_lightning.solvers import Stopping
from fprnn_lightning.solvers.gradients import Implicit, OneStep, Unrolled

WIDTH, TIME = 4, 7
INPUT_ONLY = StateDependence(False, False, False, False)
EVERY_DEPENDENCE = [StateDependence(*switches) for switches in product([True, False], repeat=5)]
EVERY_RULE = [Unrolled(), Implicit(300, 1e-14)]


def _fixed_point(like=None, **options) -> FixedPointMixer:
    solved = {"stopping": Stopping(1e-13, 1.0), "train_iterations": 300, "evaluation_iterations": 300}
    mixer = FixedPointMixer(WIDTH, **solved | options).double()
    if like is not None:
        mixer.load_state_dict(like.state_dict())
    return mixer


def _outputs_and_gradients(mixer, x):
    mixer.zero_grad()
    x = x.clone().requires_grad_()
    y = mixer(x)
    y.sin().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: parameter.grad for name, parameter in mixer.named_parameters()}


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, TIME, WIDTH, dtype=torch.double)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("dependence", EVERY_DEPENDENCE, ids=str)
def test_converged_iteration_is_the_dense_mixer_in_outputs_and_gradients(dependence, rank, x):
    options = {"dependence": dependence, "channel_mixer": lambda channels: Householder(channels, rank)}
    dense = DenseMixer(WIDTH, **options).double()
    expected = _outputs_and_gradients(dense, x)
    for rule in EVERY_RULE:
        found = _outputs_and_gradients(_fixed_point(dense, gradient=rule, **options), x)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_one_step_has_the_outputs_but_not_the_gradients_of_the_dense_mixer(x):
    dense = DenseMixer(WIDTH).double()
    expected, found = (
        _outputs_and_gradients(dense, x),
        _outputs_and_gradients(_fixed_point(dense, gradient=OneStep()), x),
    )
    torch.testing.assert_close(found["y"], expected["y"])
    assert (found["x"] - expected["x"]).abs().max() > 1e-3


@pytest.mark.parametrize("rank", [1, 2])
def test_input_dependent_terms_give_the_explicit_dense_linear_recurrence(rank, x):
    """h_t = A_t h_{t-1} + B_t with A_t = M_t^-1 diag(lambda_t), built from the matrix Q_t itself."""
    mixer = DenseMixer(
        WIDTH, channel_mixer=lambda channels: Householder(channels, rank), dependence=INPUT_ONLY
    ).double()
    inner, _ = mixer.input_projection(x).chunk(2, -1)
    raw_decay, raw_mixer, raw_input = mixer.terms.from_input(inner).split(mixer.terms.sizes, -1)
    identity = torch.eye(mixer.core.channels, dtype=torch.double)
    decay, q, w = raw_decay.sigmoid(), mixer.channel_mixer.dense_matrix(raw_mixer), (1 + raw_input) * inner
    h, states = torch.zeros(3, mixer.core.channels, dtype=torch.double), []
    for t in range(TIME):
        system = identity - (1 - decay[:, t, :, None]) * (identity - q[:, t])
        right = decay[:, t] * h + (1 - decay[:, t]) * (q[:, t] @ w[:, t, :, None])[..., 0]
        h = torch.linalg.solve(system, right)
        states.append(h)
    torch.testing.assert_close(mixer.states(inner, mixer.terms.from_input(inner)), torch.stack(states, 1))


def test_no_mixing_is_the_diagonal_mixer_after_one_iteration(x):
    """Q = I, reached by strengths of zero, and nothing reads the state."""
    fixed_point = _fixed_point(dependence=INPUT_ONLY, train_iterations=1, evaluation_iterations=1)
    channels = fixed_point.core.channels
    with torch.no_grad():
        fixed_point.terms.from_input.weight[2 * channels] = 0
        fixed_point.terms.from_input.bias[2 * channels] = -torch.inf
    diagonal = DiagonalMixer(WIDTH).double()
    kept = [*range(channels), *range(2 * channels + 1, 3 * channels + 1)]
    weights = fixed_point.state_dict()
    weights["terms.from_input.weight"] = weights["terms.from_input.weight"][kept]
    weights["terms.from_input.bias"] = weights["terms.from_input.bias"][kept]
    diagonal.load_state_dict(weights)
    torch.testing.assert_close(fixed_point(x), diagonal(x))
    torch.testing.assert_close(fixed_point.eval()(x), diagonal(x))


def test_what_reads_the_input_alone_is_computed_once(x, monkeypatch):
    calls = []

    def coefficients(self, raw):
        calls.append(raw)
        return original(self, raw)

    original = Householder.coefficients
    monkeypatch.setattr(Householder, "coefficients", coefficients)
    for dependence in (INPUT_ONLY, StateDependence(True, False, True, True)):
        _fixed_point(dependence=dependence)(x)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", [DenseMixer, FixedPointMixer])
def test_a_channel_mixer_that_reads_nothing_is_made_once(kind, x, monkeypatch):
    calls = []

    def coefficients(self, raw):
        calls.append(raw)
        return original(self, raw)

    original = Orthogonal.coefficients
    monkeypatch.setattr(Orthogonal, "coefficients", coefficients)
    kind(WIDTH, channel_mixer=Orthogonal).double()(x)
    assert len(calls) == 1


def test_more_iterations_come_closer_to_the_dense_mixer(x):
    dense = DenseMixer(WIDTH).double()
    errors = [
        (_fixed_point(dense, train_iterations=cap)(x) - dense(x)).abs().max().item() for cap in (1, 2, 4, 8, 16, 32)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-3 * errors[0]


def test_the_error_of_an_input_dependent_iteration_falls_by_the_contraction_bound(x):
    """||f(h) - f(h')|| <= max ||diag(1 - lambda) (I - Q)|| ||h - h'|| / ... for constant lambda: theorem 3.1's rate."""
    mixer = _fixed_point(dependence=INPUT_ONLY)
    channels = mixer.core.channels
    with torch.no_grad():
        mixer.terms.from_input.weight[:channels] = 0
        mixer.terms.from_input.bias[:channels] = 1.5
    inner, _ = mixer.input_projection(x).chunk(2, -1)
    raw = mixer.terms.from_input(inner)
    strength = raw[..., 2 * channels].sigmoid().max()
    exact = mixer.states(inner, raw)
    errors = []
    for cap in (3, 4, 5):
        mixer.train_iterations = cap
        errors.append((mixer.states(inner, raw) - exact).norm())
    # the scan's gain from drive to state is at most (1 - lambda) sum_k lambda^k <= 1, and ||I - Q|| = alpha
    assert errors[1] <= strength * errors[0] and errors[2] <= strength * errors[1]


def test_diagnostics_tell_each_sequence(x):
    mixer = _fixed_point(stopping=Stopping(1e-6, 1.0)).eval()
    assert mixer.diagnostics() == {}
    mixer(x)
    report = mixer.diagnostics()
    assert {name: value.shape for name, value in report.items()} == dict.fromkeys(
        ("iterations", "residual", "converged"), torch.Size([3])
    )
    assert report["converged"].all() and (report["residual"] < 1e-6).all() and (report["iterations"] > 2).all()
    mixer.evaluation_iterations = 2
    mixer(x)
    assert not mixer.diagnostics()["converged"].any() and (mixer.diagnostics()["iterations"] == 2).all()
