"""The numba recurrence against the loop over composed operations: outputs and every gradient, at odd sizes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.dense_kernels import SMALLEST_SHARE
from fprnn_lightning.mixers.recurrent import StateDependence


def _outputs_and_gradients(mixer: DenseMixer, x: torch.Tensor, fused: bool) -> dict[str, torch.Tensor]:
    mixer.zero_grad()
    mixer.fused = fused
    x = x.clone().requires_grad_()
    y = mixer(x)
    y.sin().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: parameter.grad for name, parameter in mixer.named_parameters()}


@given(
    batch=st.integers(1, 5), time=st.integers(1, 6), width=st.integers(1, 9), rank=st.integers(1, 4),
    switches=st.tuples(*[st.booleans()] * 5), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_float64_agrees_with_the_loop(batch, time, width, rank, switches, seed):
    torch.manual_seed(seed)
    mixer = DenseMixer(
        width,
        expand=4,
        channel_mixer=lambda channels: Householder(channels, rank),
        dependence=StateDependence(*switches),
    ).double()
    x = torch.randn(batch, time, width, dtype=torch.double)
    fused, loop = (_outputs_and_gradients(mixer, x, fused) for fused in (True, False))
    torch.testing.assert_close(fused, loop, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", [1, 2])
def test_float32_is_as_exact_as_the_loop(rank):
    torch.manual_seed(0)
    mixer = DenseMixer(24, channel_mixer=lambda channels: Householder(channels, rank))
    x = torch.randn(33, 21, 24)
    fused, loop = (_outputs_and_gradients(mixer, x, fused) for fused in (True, False))
    exact = _outputs_and_gradients(mixer.double(), x.double(), False)
    for name in exact:
        scale = exact[name].abs().max()
        error, allowed = ((part[name] - exact[name]).abs().max() / scale for part in (fused, loop))
        assert error <= 2 * allowed + 1e-6, f"{name}: {error:.1e}, allowed {2 * allowed + 1e-6:.1e}"


@pytest.mark.parametrize("scale", [0.0, 1e-7, 3e-6])
def test_directions_too_short_to_be_normalised(scale):
    torch.manual_seed(0)
    mixer = DenseMixer(4).double()
    channels = mixer.core.channels
    with torch.no_grad():
        for part in (mixer.terms.from_input.weight, mixer.terms.from_input.bias, mixer.terms.from_feedback.weight):
            part[channels : 2 * channels] *= scale
    x = torch.randn(3, 5, 4, dtype=torch.double)
    torch.testing.assert_close(*(_outputs_and_gradients(mixer, x, fused) for fused in (True, False)))


def test_a_singular_token_spoils_its_own_sequence_only():
    torch.manual_seed(0)
    mixer = DenseMixer(4, dependence=StateDependence(False, False, False, False))
    channels = mixer.core.channels
    x = torch.randn(6, 3, channels)
    raw = torch.randn(6, 3, sum(mixer.terms.sizes))
    alone = mixer.states(x, raw)
    raw[0, 1, :channels], raw[0, 1, 2 * channels] = -40.0, 40.0  # decay 0 and strength 1, so that K = 0
    raw[0, 1, channels : 2 * channels] = torch.eye(channels)[0]
    for fused in (True, False):
        mixer.fused = fused
        together = mixer.states(x, raw)
        torch.testing.assert_close(together[1:], alone[1:])
        assert not together[0, 1].isfinite().all() and together[0, 0].isfinite().all()


def test_threads_change_nothing():
    torch.manual_seed(0)
    mixer, before = DenseMixer(64), torch.get_num_threads()
    x = torch.randn(3 * SMALLEST_SHARE // mixer.core.channels, 5, 64)
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(_outputs_and_gradients(mixer, x, True))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*results)


def test_non_contiguous_input_and_no_gradient():
    torch.manual_seed(0)
    mixer = DenseMixer(4).double()
    x = torch.randn(7, 3, 4, dtype=torch.double).transpose(0, 1)
    with torch.no_grad():
        fused = mixer(x)
    mixer.fused = False
    torch.testing.assert_close(fused, mixer(x))


def test_what_is_not_finite_stays_so():
    mixer = DenseMixer(4)
    x = torch.randn(2, 3, 4)
    x[0, 1] = torch.nan
    y = mixer(x)
    assert y[0, 0].isfinite().all() and y[0, 1:].isnan().all() and y[1].isfinite().all()


def test_strengths_beyond_one_are_the_loops():
    torch.manual_seed(0)
    mixer = DenseMixer(4, channel_mixer=lambda channels: Householder(channels, largest=1.2)).double()
    x = torch.randn(2, 5, 4, dtype=torch.double)
    fused, loop = (_outputs_and_gradients(mixer, x, fused) for fused in (True, False))
    torch.testing.assert_close(fused, loop, rtol=1e-12, atol=1e-12)
