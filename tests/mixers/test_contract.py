"""What every registered mixer promises: shape, causality, step = forward, independence of the batch, gradients."""

from copy import deepcopy
from inspect import isabstract

import pytest
import torch

from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.cores.state_space_dual import StateSpaceDual
from fprnn_lightning.mixers import SequenceMixer
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.solvers import Stopping
from fprnn_lightning.solvers.gradients import Implicit

WIDTH = 6


def _solved(width: int, **options) -> FixedPointMixer:
    caps = {"train_iterations": 300, "evaluation_iterations": 300}
    rules = {"stopping": Stopping(1e-12, 1.0), "gradient": Implicit(300, 1e-12)}
    return FixedPointMixer(width, expand=1.5, **caps, **rules, **options)


def _mamba(channels: int) -> SelectiveSSM:
    return SelectiveSSM(channels, states=8)


def _mamba_2(channels: int) -> StateSpaceDual:
    return StateSpaceDual(channels, states=8, head_channels=3)


FACTORIES = {
    DiagonalMixer: lambda width: DiagonalMixer(width, expand=1.5),
    DenseMixer: lambda width: DenseMixer(width, expand=1.5),
    FixedPointMixer: _solved,
    LSTMMixer: lambda width: LSTMMixer(width, expand=1.5),
}
VARIANTS = {
    "Mamba": lambda width: DiagonalMixer(width, 1.5, _mamba, convolution=4, normalise=False),
    "Mamba-2": lambda width: DiagonalMixer(width, 1.5, _mamba_2, convolution=4),
    "dense Mamba": lambda width: DenseMixer(width, 1.5, _mamba, convolution=2),
    "FP-Mamba": lambda width: _solved(width, core=_mamba, convolution=3),
    "FP-Mamba-2": lambda width: _solved(width, core=_mamba_2),
}


def _subclasses(kind: type) -> set[type]:
    return {kind}.union(*(_subclasses(child) for child in kind.__subclasses__()))


def test_every_registered_mixer_is_tested():
    registered = {mixer for mixer in _subclasses(SequenceMixer) if not isabstract(mixer)}
    assert {mixer for mixer in registered if mixer.__module__.startswith("fprnn_lightning.")} == set(FACTORIES)


@pytest.fixture(
    params=[*FACTORIES.values(), *VARIANTS.values()], ids=[*(mixer.__name__ for mixer in FACTORIES), *VARIANTS]
)
def mixer(request) -> SequenceMixer:
    torch.manual_seed(0)
    return request.param(WIDTH).double()


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 13)])
def test_shapes_and_finite_gradients(mixer, shape):
    x = torch.randn(*shape, WIDTH, dtype=torch.double, requires_grad=True)
    y = mixer(x)
    assert y.shape == x.shape
    y.square().sum().backward()
    for name, parameter in [("x", x), *mixer.named_parameters()]:
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_gradients_are_the_finite_differences(mixer):
    x = torch.randn(2, 4, WIDTH, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(mixer, x, eps=1e-6, atol=1e-5, fast_mode=True)


@pytest.mark.parametrize("training", [True, False])
def test_step_repeated_is_forward(mixer, training):
    mixer.train(training)
    x = torch.randn(3, 11, WIDTH, dtype=torch.double)
    state, outputs = mixer.initial_state(3), []
    for x_t in x.unbind(1):
        y_t, state = mixer.step(x_t, state)
        outputs.append(y_t)
    torch.testing.assert_close(torch.stack(outputs, 1), mixer(x), rtol=1e-8, atol=1e-8)


def test_outputs_do_not_depend_on_later_tokens_padding_or_the_batch(mixer):
    mixer.eval()
    x = torch.randn(4, 9, WIDTH, dtype=torch.double)
    whole = mixer(x)
    torch.testing.assert_close(mixer(x[:, :5]), whole[:, :5], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mixer(x[2:3]), whole[2:3], rtol=1e-12, atol=1e-12)
    padded = torch.cat([x, 100 * torch.randn(4, 3, WIDTH, dtype=torch.double)], 1)
    torch.testing.assert_close(mixer(padded)[:, :9], whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("iterations", [2, 5, 64])
def test_that_holds_for_a_loose_solve_too(iterations):
    """Many sequences of different difficulty, a coarse tolerance, and caps that bind: each still stops for itself."""
    torch.manual_seed(0)
    mixer = FixedPointMixer(16, stopping=Stopping(0.1, 0.75), evaluation_iterations=iterations).double().eval()
    with torch.no_grad():
        mixer.terms.from_feedback.weight *= 3
        x = torch.randn(12, 40, 16, dtype=torch.double) * torch.logspace(-1, 1, 12, dtype=torch.double)[:, None, None]
        whole = mixer(x)
        assert len(mixer.diagnostics()["iterations"].unique()) > 1 or iterations < 64
        torch.testing.assert_close(mixer(x[:, :17]), whole[:, :17], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mixer(x[3:5]), whole[3:5], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factory", [DenseMixer, DiagonalMixer, FixedPointMixer, LSTMMixer])
def test_the_state_is_float32_under_autocast(factory):
    """With a decay so near to 1 that bfloat16 rounds it to 1, nothing would ever be written into the state."""
    torch.manual_seed(0)
    mixer = factory(16).eval()
    if factory is not LSTMMixer:
        with torch.no_grad():
            mixer.terms.from_input.bias[: mixer.core.channels] = 7.0
    x = torch.randn(2, 100, 16)
    with torch.no_grad():
        exact = mixer(x)
        with torch.autocast("cpu", torch.bfloat16):
            forward, state, steps = mixer(x), mixer.initial_state(2), []
            for x_t in x.unbind(1):
                y_t, state = mixer.step(x_t, state)
                steps.append(y_t)
    scale = exact.abs().max()
    assert (forward.float() - exact).abs().max() < 0.05 * scale
    assert (torch.stack(steps, 1).float() - exact).abs().max() < 0.05 * scale


def test_bfloat16_weights_work(mixer):
    x = torch.randn(2, 6, WIDTH, dtype=torch.double)
    exact = mixer(x)
    mixer.bfloat16()
    rounded = mixer(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert (rounded.double() - exact).abs().max() < 0.1 * exact.abs().max()


def test_a_mixer_can_be_copied_after_a_forward(mixer):
    x = torch.randn(2, 5, WIDTH, dtype=torch.double)
    y = mixer(x)
    assert torch.equal(deepcopy(mixer)(x), y)


def test_weights_travel_by_state_dict(mixer):
    other = deepcopy(mixer)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    other.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 5, WIDTH, dtype=torch.double)
    assert torch.equal(other(x), mixer(x))


def test_bfloat16_autocast_stays_near_float32(mixer):
    mixer.float()
    x = torch.randn(2, 12, WIDTH)
    exact = mixer(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = mixer(x)
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()
    rounded.float().sum().backward()


@pytest.mark.parametrize("core", [GatedDiagonal, _mamba, _mamba_2])
def test_a_long_sequence_under_bfloat16_autocast_stays_finite(core):
    """A loop that is stable only in exact arithmetic, or in short sequences, would not."""
    torch.manual_seed(0)
    mixer = FixedPointMixer(WIDTH, 1.5, core, train_iterations=12, gradient=Implicit(12, 1e-2))
    with torch.no_grad():
        for bias in (part for name, part in mixer.core.named_parameters() if name == "dt_bias"):
            bias += 3
        mixer.terms.from_input.weight *= 3
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(torch.randn(1, 2048, WIDTH))
        y.float().square().sum().backward()
    assert y.isfinite().all()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("factory", [DenseMixer, DiagonalMixer, FixedPointMixer, LSTMMixer])
def test_channels_that_are_no_whole_number_are_refused(factory):
    with pytest.raises(ValueError, match=r"expand 1\.5 times width 5 gives 7\.5 channels, must be a whole number"):
        factory(5, expand=1.5)
    with pytest.raises(ValueError, match="width is 0"):
        factory(0)


def test_it_says_what_it_is(mixer):
    said = mixer.describe()
    assert said["mixer"] == {
        DiagonalMixer: "diagonal",
        DenseMixer: "dense",
        FixedPointMixer: "fixed_point",
        LSTMMixer: "lstm",
    }.get(type(mixer))
    assert ("core" in said) == (type(mixer) is not LSTMMixer)
    assert ("rank" in said) == ("channel_mixer" in said) == (type(mixer) in (DenseMixer, FixedPointMixer))
    assert ("gradient" in said) == ("iterations" in said) == ("solver" in said) == (type(mixer) is FixedPointMixer)


def test_generation_carries_as_much_as_it_says(mixer):
    _, state = mixer.step(torch.randn(1, WIDTH, dtype=torch.double), mixer.initial_state(1))
    assert mixer.state_bytes() == sum(part.numel() * 8 for part in state)


@pytest.mark.parametrize("shape", [(1, 1), (3, 9)])
def test_a_profile_says_how_states_are_found_and_changes_nothing(mixer, shape):
    mixer.eval()
    x = torch.randn(*shape, WIDTH, dtype=torch.double)
    with torch.inference_mode():  # as in a validation
        mixer(x)
        told = dict(mixer.diagnostics())
        random, weights = torch.get_rng_state(), deepcopy(mixer.state_dict())
        profile = mixer.profile(x)
        assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(mixer.state_dict(), weights, rtol=0, atol=0)
    torch.testing.assert_close(mixer.diagnostics(), told, rtol=0, atol=0)
    if type(mixer) is LSTMMixer:
        assert profile is None
        return
    assert (profile.decays >= 0).all() and (profile.decays <= 1).all() and len(profile.decays) % shape[0] == 0
    assert (profile.iteration is not None) == (type(mixer) is FixedPointMixer)
    if type(mixer) is DiagonalMixer:
        assert profile.contraction is None and profile.contraction_bound is None
    else:
        assert profile.contraction.shape == profile.contraction_bound.shape == shape
        assert (profile.contraction > 0).all()
        assert (profile.contraction <= profile.contraction_bound * (1 + 1e-9)).all()


@pytest.mark.parametrize("autocast", [True, False])
def test_a_profile_in_bfloat16_is_about_that_in_float64(mixer, autocast):
    mixer.eval()
    x = torch.randn(2, 6, WIDTH, dtype=torch.double)
    exact = mixer.profile(x)
    mixer.to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rounded = mixer.profile(x.to(torch.float32 if autocast else torch.bfloat16))
    for name in ("decays", "contraction", "contraction_bound"):
        if getattr(exact, name, None) is not None:
            torch.testing.assert_close(getattr(rounded, name).double(), getattr(exact, name), rtol=0.05, atol=0.05)


def test_a_profile_shows_the_iteration_that_evaluation_makes():
    """About as many iterations as the slowest prefix takes, until all have settled; the first tokens settle first."""
    torch.manual_seed(0)
    mixer = FixedPointMixer(WIDTH, evaluation_iterations=64, train_iterations=12).double().eval()
    x = torch.randn(3, 20, WIDTH, dtype=torch.double)
    with torch.no_grad():
        mixer(x)
    residuals, tolerance, most = mixer.profile(x).iteration
    told = mixer.diagnostics()
    assert residuals.shape[1:] == (3, 20) and (tolerance, most) == (0.01, 12)
    assert len(residuals) == pytest.approx(told["iterations"].max().item(), abs=1)  # what has settled goes on here
    assert (residuals[-1] < tolerance).all() and not (residuals[-2] < tolerance).all()
    settled = (residuals < tolerance).int().argmax(0)
    assert (settled[:, 0] < settled.amax(1)).all(), "the first token settles before the last that does"
