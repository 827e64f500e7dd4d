"""The fused iteration against the composed one: values, what is measured, and a mixer's outputs and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.channel_mixers.low_rank import LowRank
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.fused_step import FusedStep, fused_step
from fprnn_lightning.mixers.recurrent import RecurrentMixer, StateDependence, shift
from fprnn_lightning.mixers.token_cpu_kernels import SMALLEST_SHARE
from fprnn_lightning.solvers.items import PREFIXES, SEQUENCES, Items


def make_mixer(width: int, rank: int = 1, product: bool = True, largest: float = 1.0, **options) -> FixedPointMixer:
    kind = Householder if product else LowRank
    return FixedPointMixer(width, expand=3, channel_mixer=lambda channels: kind(channels, rank, largest), **options)


def composed(mixer: RecurrentMixer, x: Tensor, raw: Tensor, y: Tensor) -> Tensor:
    gates, q = mixer.gates_and_mixing(x, raw, shift(mixer.seen(y, x)))
    return mixer.core.sequence_pass(gates, mixer.residual(gates, q, y))[0]


def make_step(mixer: FixedPointMixer, x: Tensor, raw: Tensor, initial: Tensor, items: Items = PREFIXES) -> FusedStep:
    return FusedStep("cpu", mixer, x, raw, initial, items)


def inputs(mixer: FixedPointMixer, batch: int, time: int) -> tuple[Tensor, Tensor]:
    bias = mixer.terms.from_input.bias
    x = torch.randn(batch, time, mixer.core.channels, dtype=bias.dtype)
    return x, mixer.terms.from_input(x).detach()


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1)


@given(
    batch=st.integers(1, 4), time=st.integers(1, 6), width=st.integers(1, 7), rank=st.integers(1, 3),
    product=st.booleans(), switches=st.tuples(*[st.booleans()] * 6), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
@torch.no_grad()
def test_float64_is_the_composed_iteration(batch, time, width, rank, product, switches, seed):
    torch.manual_seed(seed)
    mixer = make_mixer(width, rank, product, dependence=StateDependence(*switches)).double()
    x, raw = inputs(mixer, batch, time)
    y = torch.zeros_like(x)
    steps = [make_step(mixer, x, raw, y, items) for items in (PREFIXES, SEQUENCES)]
    for _ in range(4):  # the first from y = 0, the others from both buffers
        expected = composed(mixer, x, raw, y)
        change, size = largest(expected - y), largest(expected)
        of_prefixes, of_sequences = (change / size).cummax(1).values, change.amax(1) / size.amax(1)
        for step, of_items in zip(steps, (of_prefixes, of_sequences), strict=True):
            found = step(y)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(step.measure(y, found), of_items, rtol=1e-9, atol=1e-12)
        y = found


@pytest.mark.parametrize("rank", [1, 3])
@torch.no_grad()
def test_float32_is_as_exact_as_the_composed_iteration(rank):
    torch.manual_seed(0)
    mixer = make_mixer(11, rank)
    x, raw = inputs(mixer, 5, 21)
    y = torch.randn_like(x)
    found, own = make_step(mixer, x, raw, torch.zeros_like(x))(y), composed(mixer, x, raw, y)
    exact = composed(mixer.double(), x.double(), raw.double(), y.double())
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() <= 2 * (own - exact).abs().max() + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_products_are_bfloat16_where_autocast_says_so(dtype):
    torch.manual_seed(0)
    mixer = make_mixer(8).to(dtype)
    x, raw = inputs(mixer, 3, 9)
    y, initial = torch.randn_like(x), torch.zeros_like(x)
    exact = make_step(mixer, x, raw, initial)(y)
    with torch.autocast("cpu", torch.bfloat16):
        found = make_step(mixer, x, raw, initial)(y)
    error = (found - exact).abs().max() / exact.abs().max()
    assert found.dtype == dtype
    assert 1e-5 < error < 2e-2 if dtype == torch.float32 else error == 0


@pytest.mark.parametrize("scale", [0.0, 1e-7, 3e-6])
@torch.no_grad()
def test_directions_too_short_to_be_normalised(scale):
    torch.manual_seed(0)
    mixer = make_mixer(4).double()
    x, raw = inputs(mixer, 2, 3)
    channels = mixer.core.channels
    raw[..., channels : 2 * channels] *= scale
    mixer.terms.from_feedback.weight[channels : 2 * channels] *= scale
    y = torch.randn_like(x)
    found = make_step(mixer, x, raw, torch.zeros_like(x))(y)
    torch.testing.assert_close(found, composed(mixer, x, raw, y), rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_threads_change_nothing():
    torch.manual_seed(0)
    mixer, before = make_mixer(16), torch.get_num_threads()
    x, raw = inputs(mixer, 3 * SMALLEST_SHARE // (16 * mixer.core.channels) + 1, 16)
    y, results = torch.randn_like(x), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(make_step(mixer, x, raw, torch.zeros_like(x))(y))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*results)


def test_what_has_no_kernel_falls_back():
    x = torch.randn(2, 3, 12)
    fits = make_mixer(4)
    raw = fits.terms.from_input(x)
    assert fused_step(fits, fits.solver, x, raw, x, SEQUENCES) is not None
    for other in (make_mixer(4, largest=2.0), make_mixer(4, core=type("Other", (GatedDiagonal,), {}))):
        assert fused_step(other, other.solver, x, raw, x, SEQUENCES) is None
    assert fused_step(fits, type("Other", (type(fits.solver),), {})(), x, raw, x, SEQUENCES) is None
