"""Every core with every channel mixer: the limits of the theory, and one token at a time against in parallel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.cores.state_space_dual import StateSpaceDual
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.recurrent import RecurrentMixer, StateDependence
from fprnn_lightning.solvers import Stopping
from fprnn_lightning.solvers.gradients import Implicit

WIDTH, TIME = 4, 5
CORES = {
    "FP-RNN": GatedDiagonal,
    "FP-Mamba": lambda channels: SelectiveSSM(channels, states=3),
    "FP-Mamba-2": lambda channels: StateSpaceDual(channels, states=3, head_channels=4),
}
INPUT_ONLY = StateDependence(False, False, False, False)

every_core = pytest.mark.parametrize("core", CORES.values(), ids=CORES)
every_channel_mixer = pytest.mark.parametrize("channel_mixer", ChannelMixer.__subclasses__(), ids=lambda c: c.__name__)


def _mixer(kind: type[RecurrentMixer], dtype: torch.dtype = torch.double, **options) -> RecurrentMixer:
    if kind is FixedPointMixer:
        tolerance = 1e-13 if dtype == torch.double else 1e-6
        options |= {"stopping": Stopping(tolerance, 1.0), "gradient": Implicit(400, 1e-14)}
        options |= {"train_iterations": 400, "evaluation_iterations": 400}
    torch.manual_seed(0)
    mixer = kind(WIDTH, **options).to(dtype)
    with torch.no_grad():
        for weights in mixer.terms.parameters():
            weights *= 2  # away from the start of training, where selective cores hardly mix
    return mixer


def _outputs_and_gradients(mixer: RecurrentMixer, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = mixer(x)
    y.sin().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: parameter.grad for name, parameter in mixer.named_parameters()}


@every_core
@every_channel_mixer
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_converged_iteration_is_the_dense_mixer_in_outputs_and_gradients(core, channel_mixer, symmetric):
    options = {"core": core, "channel_mixer": channel_mixer, "dependence": StateDependence(symmetric=symmetric)}
    x = torch.randn(2, TIME, WIDTH, dtype=torch.double)
    dense, fixed_point = (_outputs_and_gradients(_mixer(kind, **options), x) for kind in (DenseMixer, FixedPointMixer))
    torch.testing.assert_close(fixed_point, dense, rtol=1e-8, atol=1e-8)


@every_core
@every_channel_mixer
def test_terms_of_the_input_alone_give_the_loop_with_the_dense_matrix(core, channel_mixer):
    """y_t = offset_t + diag(gain_t) (I - Q_t)(y_t - w_t), solved with the matrix Q_t itself: outputs and gradients."""
    mixer = _mixer(DenseMixer, core=core, channel_mixer=channel_mixer, dependence=INPUT_ONLY)
    inner = torch.randn(2, TIME, mixer.core.channels, dtype=torch.double, requires_grad=True)
    raw = mixer.terms.from_input(inner)
    raw_decay, raw_mixer, raw_input, *raw_output = raw.split(mixer.terms.sizes, -1)
    gates = mixer.core.gates(raw_decay, raw_input, *(raw_output or [None]), inner)
    identity = torch.eye(mixer.core.channels, dtype=torch.double)
    residual_matrix = identity - mixer.channel_mixer.dense_matrix(raw_mixer)
    carry, states = mixer.core.initial_carry(inner[:, 0]), []
    for t in range(TIME):
        now = type(gates)(*(gate[:, t] for gate in gates))
        offset, gain = mixer.core.token_pass(now, carry)
        weighted = gain[..., None] * residual_matrix[:, t]
        y = torch.linalg.solve(identity - weighted, offset - (weighted @ now.value[..., None])[..., 0])
        carry = mixer.core.next_carry(now, carry, (residual_matrix[:, t] @ (y - now.value)[..., None])[..., 0])
        states.append(y)
    expected, actual = torch.stack(states, 1), mixer.states(inner, raw)
    torch.testing.assert_close(actual, expected)
    sources = [inner, *mixer.terms.parameters(), *mixer.channel_mixer.parameters()]
    gradients = [torch.autograd.grad(y.sin().sum(), sources, retain_graph=True) for y in (actual, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", [DenseMixer, FixedPointMixer], ids=lambda kind: kind.__name__)
@every_core
@every_channel_mixer
@given(
    dtype=st.sampled_from([torch.double, torch.float]), whole=st.integers(0, TIME), convolution=st.sampled_from([0, 3])
)
@settings(max_examples=3, deadline=None)
def test_any_split_into_whole_and_single_tokens_gives_the_same(kind, core, channel_mixer, dtype, whole, convolution):
    mixer = _mixer(kind, dtype, core=core, channel_mixer=channel_mixer, convolution=convolution).eval()
    x = torch.randn(3, TIME, WIDTH, dtype=dtype)
    with torch.no_grad():
        outputs, state = mixer.prefill(x[:, :whole]) if whole else (x[:, :0], mixer.initial_state(3))
        outputs = [outputs]
        for x_t in x[:, whole:].unbind(1):
            y_t, state = mixer.step(x_t, state)
            outputs.append(y_t[:, None])
        tolerance = 1e-9 if dtype == torch.double else 1e-4
        torch.testing.assert_close(torch.cat(outputs, 1), mixer(x), rtol=tolerance, atol=tolerance)


@every_core
@every_channel_mixer
def test_the_error_falls_at_least_by_the_bound(core, channel_mixer):
    """With a decay constant in time a pass makes nothing larger than what drives it, and mixing does by the bound."""
    mixer = _mixer(FixedPointMixer, core=core, channel_mixer=channel_mixer, dependence=INPUT_ONLY)
    inner = torch.randn(3, TIME, mixer.core.channels, dtype=torch.double)
    with torch.no_grad():
        mixer.terms.from_input.weight[: mixer.core.decay_channels] = 0
        raw = mixer.terms.from_input(inner)
        bound = mixer.channel_mixer.residual_bound(mixer.channel_mixer.coefficients(mixer.terms(raw, None)[1])).max()
        exact, errors = mixer.states(inner, raw), []
        for mixer.train_iterations in (2, 3, 4):
            errors.append((mixer.states(inner, raw) - exact).norm())
    assert errors[1] <= bound * errors[0] and errors[2] <= bound * errors[1]
