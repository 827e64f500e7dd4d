"""Each channel mixer within sequence mixers: explicit dense recurrence, converged iteration, its rate, single steps."""

import pytest
import torch

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.recurrent import StateDependence
from fprnn_lightning.solvers import Stopping
from fprnn_lightning.solvers.gradients import Implicit

WIDTH, TIME = 4, 6
INPUT_ONLY = StateDependence(False, False, False, False)
every_channel_mixer = pytest.mark.parametrize("channel_mixer", ChannelMixer.__subclasses__())


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, TIME, WIDTH, dtype=torch.double, requires_grad=True)


def _solved(like: DenseMixer, **options) -> FixedPointMixer:
    caps = {"train_iterations": 1000, "evaluation_iterations": 1000}
    rules = {"stopping": Stopping(1e-13, 1.0), "gradient": Implicit(1000, 1e-14)}
    mixer = FixedPointMixer(WIDTH, **caps, **rules, **options).double()
    mixer.load_state_dict(like.state_dict())
    return mixer


def _with_gradients(y: torch.Tensor, x: torch.Tensor, mixer: torch.nn.Module) -> list[torch.Tensor | None]:
    inputs = [x, *mixer.parameters()]
    return [y, *torch.autograd.grad(y.sin().sum(), inputs, allow_unused=True, retain_graph=True)]


@every_channel_mixer
def test_input_dependent_terms_give_the_explicit_dense_recurrence(channel_mixer, x):
    """h_t = M_t^-1 (lambda_t * h_{t-1} + (1 - lambda_t) * Q_t w_t) from the matrices themselves, and its gradients."""
    mixer = DenseMixer(WIDTH, channel_mixer=channel_mixer, dependence=INPUT_ONLY).double()
    inner, _ = mixer.input_projection(x).chunk(2, -1)
    raw_decay, raw_mixer, raw_input = mixer.terms.from_input(inner).split(mixer.terms.sizes, -1)
    decay, q, w = raw_decay.sigmoid(), mixer.channel_mixer.dense_matrix(raw_mixer), (1 + raw_input) * inner
    identity = torch.eye(mixer.core.channels, dtype=torch.double)
    h, states = torch.zeros(3, mixer.core.channels, dtype=torch.double), []
    for t in range(TIME):
        system = identity - (1 - decay[:, t, :, None]) * (identity - q[:, t])
        right = decay[:, t] * h + (1 - decay[:, t]) * (q[:, t] @ w[:, t, :, None])[..., 0]
        h = torch.linalg.solve(system, right)
        states.append(h)
    found = mixer.states(inner, mixer.terms.from_input(inner))
    torch.testing.assert_close(_with_gradients(found, x, mixer), _with_gradients(torch.stack(states, 1), x, mixer))


@every_channel_mixer
def test_converged_iteration_is_the_dense_mixer(channel_mixer, x):
    dense = DenseMixer(WIDTH, channel_mixer=channel_mixer).double()
    fixed_point = _solved(dense, channel_mixer=channel_mixer)
    expected, found = (_with_gradients(mixer(x), x, mixer) for mixer in (dense, fixed_point))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@every_channel_mixer
def test_the_error_falls_at_least_by_the_bound(channel_mixer, x):
    """With one constant decay the scan makes nothing larger than what drives it, and mixing at most by the bound."""
    dense = DenseMixer(WIDTH, channel_mixer=channel_mixer, dependence=INPUT_ONLY).double()
    with torch.no_grad():
        dense.terms.from_input.weight[: dense.core.channels] = 0
        dense.terms.from_input.bias[: dense.core.channels] = 1.5
        inner, _ = dense.input_projection(x).chunk(2, -1)
        raw = dense.terms.from_input(inner)
        bound = dense.channel_mixer.residual_bound(dense.channel_mixer.coefficients(dense.terms(raw, None)[1])).max()
        fixed_point = _solved(dense, channel_mixer=channel_mixer, dependence=INPUT_ONLY)
        exact, errors = fixed_point.states(inner, raw), []
        for fixed_point.train_iterations in (2, 3, 4):
            errors.append((fixed_point.states(inner, raw) - exact).norm())
    assert errors[1] <= bound * errors[0] and errors[2] <= bound * errors[1]


@every_channel_mixer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_repeated_is_forward(channel_mixer, dtype, x):
    dense = DenseMixer(WIDTH, channel_mixer=channel_mixer).double()
    for mixer in (dense.to(dtype), _solved(dense, channel_mixer=channel_mixer).to(dtype).eval()):
        state, outputs = mixer.initial_state(3), []
        for x_t in x.to(dtype).unbind(1):
            y_t, state = mixer.step(x_t, state)
            outputs.append(y_t)
        tolerance = 1e-8 if dtype == torch.float64 else 1e-4
        torch.testing.assert_close(torch.stack(outputs, 1), mixer(x.to(dtype)), rtol=tolerance, atol=tolerance)
