"""The fused iteration of Mamba's core against the composed one: values, what is measured, outputs and gradients."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused_step import composed, inputs, largest, make_mixer, make_step

from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.mixers import fused_step
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.fused_selective_step_cpu_kernels import drive, step_sizes
from fprnn_lightning.mixers.recurrent import StateDependence
from fprnn_lightning.mixers.token_cpu_kernels import SMALLEST_SHARE
from fprnn_lightning.scan.selective_cpu_kernels import LOG2_E
from fprnn_lightning.solvers.items import PREFIXES, SEQUENCES


def make_mamba(width: int, rank: int = 1, product: bool = True, states: int = 3, **options) -> FixedPointMixer:
    """A mixer whose parameters are not all what they are at first."""
    core_options = {name: options.pop(name) for name in ("dt_rank", "unit_gates") if name in options}
    mixer = make_mixer(width, rank, product, core=partial(SelectiveSSM, states=states, **core_options), **options)
    with torch.no_grad():
        for parameter in (mixer.core.A_log, mixer.core.D, mixer.core.dt_bias):
            parameter.add_(torch.randn_like(parameter))
    return mixer


@given(
    batch=st.integers(1, 3), time=st.integers(1, 6), width=st.integers(1, 7), rank=st.integers(1, 3),
    states=st.integers(1, 5), dt_rank=st.integers(1, 3), product=st.booleans(), unit_gates=st.booleans(),
    switches=st.tuples(*[st.booleans()] * 6), seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
@torch.no_grad()
def test_float64_is_the_composed_iteration(
    batch, time, width, rank, states, dt_rank, product, unit_gates, switches, seed
):
    torch.manual_seed(seed)
    options = {"dt_rank": dt_rank, "unit_gates": unit_gates, "dependence": StateDependence(*switches)}
    mixer = make_mamba(width, rank, product, states, **options).double()
    x, raw = inputs(mixer, batch, time)
    y = torch.zeros_like(x)
    steps = [make_step(mixer, x, raw, y, items) for items in (PREFIXES, SEQUENCES)]
    for _ in range(3):  # the first from y = 0, of which D x is seen, the others from both buffers
        expected = composed(mixer, x, raw, y)
        change, size = largest(expected - y), largest(expected)
        of_prefixes, of_sequences = (change / size).cummax(1).values, change.amax(1) / size.amax(1)
        for step, of_items in zip(steps, (of_prefixes, of_sequences), strict=True):
            found = step(y)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(step.measure(y, found), of_items, rtol=1e-8, atol=1e-11)
        y = found


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("shift", [-6.0, 0.0, 6.0])  # step sizes from less than a thousandth to several
@torch.no_grad()
def test_float32_is_as_exact_as_the_composed_iteration(rank, shift):
    torch.manual_seed(0)
    mixer = make_mamba(11, rank, states=16)
    mixer.core.dt_bias += shift
    x, raw = inputs(mixer, 5, 21)
    y = torch.randn_like(x)
    found, own = make_step(mixer, x, raw, torch.zeros_like(x))(y), composed(mixer, x, raw, y)
    exact = composed(mixer.double(), x.double(), raw.double(), y.double())
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() <= 2 * (own - exact).abs().max() + 1e-6 * exact.abs().max()


@pytest.mark.parametrize(("kind", "tolerance"), [(np.float32, 4e-6), (np.float64, 2e-14)])
def test_step_sizes_are_exact_however_small(kind, tolerance):
    raw = np.linspace(-25, 25, 1001, dtype=kind)
    dt = raw.copy()
    step_sizes(dt.ctypes.data, dt.size, kind(0), kind(-LOG2_E))
    np.testing.assert_allclose(dt, np.logaddexp(0, raw.astype(float)), rtol=tolerance)


@pytest.mark.parametrize(("kind", "tolerance"), [(np.float32, 3e-7), (np.float64, 1e-15)])
def test_residuals_are_weighted_exactly_however_small_the_step(kind, tolerance):
    dt = np.geomspace(1e-6, 40, 1001, dtype=kind)
    u, out, x, rates, ones = (np.full_like(dt, value) for value in (np.nan, np.nan, 0, -1, 1))
    drive(*(each.ctypes.data for each in (u, ones, dt, rates, x, out)), dt.size, kind(0))
    np.testing.assert_allclose(u, -np.expm1(-dt.astype(float) * np.log(2)), rtol=tolerance)
    assert not out.any()


@pytest.mark.parametrize("scale", [0.0, 1e-13, 1e-11])
@torch.no_grad()
def test_gates_too_short_to_be_normalised(scale):
    torch.manual_seed(0)
    mixer = make_mamba(4).double()
    x, raw = inputs(mixer, 2, 3)
    raw[..., -2 * 3 :] *= scale
    mixer.terms.from_feedback.weight[-2 * 3 :] *= scale
    y = torch.randn_like(x)
    found = make_step(mixer, x, raw, torch.zeros_like(x))(y)
    torch.testing.assert_close(found, composed(mixer, x, raw, y), rtol=1e-11, atol=0)


@torch.no_grad()
def test_threads_change_nothing():
    torch.manual_seed(0)
    mixer, before = make_mamba(8), torch.get_num_threads()
    numbers = 4 * mixer.core.A_log.numel()  # of a sequence of 4 tokens
    x, raw = inputs(mixer, 3 * SMALLEST_SHARE // numbers + 1, 4)
    y, results = torch.randn_like(x), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(make_step(mixer, x, raw, torch.zeros_like(x))(y))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(*results)


def test_what_has_no_kernel_falls_back(monkeypatch):
    x = torch.randn(2, 3, 12)
    fits, other = make_mamba(4), make_mixer(4, core=type("Other", (SelectiveSSM,), {}))
    unit = fused_step.fused_step
    assert unit(fits, fits.solver, x, fits.terms.from_input(x), x, SEQUENCES) is not None
    assert unit(other, other.solver, x, other.terms.from_input(x), x, SEQUENCES) is None
    monkeypatch.setattr(fused_step, "resolve_backend", lambda x: "triton")
    assert unit(fits, fits.solver, x, fits.terms.from_input(x), x, SEQUENCES) is None
