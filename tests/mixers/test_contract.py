"""What every registered mixer promises: shape, causality, step = forward, independence of the batch, gradients."""

from copy import deepcopy

import pytest
import torch

from fprnn_lightning.mixers import SequenceMixer
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.solvers import Stopping
from fprnn_lightning.solvers.gradients import Implicit

WIDTH = 6


def _solved(width: int) -> FixedPointMixer:
    caps = {"train_iterations": 300, "evaluation_iterations": 300}
    rules = {"stopping": Stopping(1e-12, 1.0), "gradient": Implicit(300, 1e-12)}
    return FixedPointMixer(width, expand=1.5, **caps, **rules)


FACTORIES = {
    DiagonalMixer: lambda width: DiagonalMixer(width, expand=1.5),
    DenseMixer: lambda width: DenseMixer(width, expand=1.5),
    FixedPointMixer: _solved,
    LSTMMixer: lambda width: LSTMMixer(width, expand=1.5),
}


def _leaves(kind: type) -> set[type]:
    below = {leaf for child in kind.__subclasses__() for leaf in _leaves(child)}
    return below or {kind}


def test_every_registered_mixer_is_tested():
    registered = {mixer for mixer in _leaves(SequenceMixer) if mixer.__module__.startswith("fprnn_lightning.")}
    assert registered == set(FACTORIES)


@pytest.fixture(params=FACTORIES.values(), ids=[mixer.__name__ for mixer in FACTORIES])
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
    assert torch.autograd.gradcheck(mixer, x, eps=1e-6, atol=1e-5)


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


@pytest.mark.parametrize("factory", [DenseMixer, DiagonalMixer, FixedPointMixer, LSTMMixer])
def test_channels_that_are_no_whole_number_are_refused(factory):
    with pytest.raises(ValueError, match=r"expand 1\.5 times width 5 gives 7\.5 channels, must be a whole number"):
        factory(5, expand=1.5)
    with pytest.raises(ValueError, match="width is 0"):
        factory(0)
