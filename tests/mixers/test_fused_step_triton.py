"""The fused iteration's Triton kernel against the composed iteration: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from test_fused_step import composed, largest, make_mixer

from fprnn_lightning.mixers.fused_step import FusedStep
from fprnn_lightning.mixers.recurrent import StateDependence
from fprnn_lightning.solvers.items import PREFIXES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(mixer, batch: int, time: int, tolerance: float) -> None:
    torch.manual_seed(0)
    dtype = mixer.terms.from_input.weight.dtype
    mixer = mixer.to(DEVICE)
    x = torch.randn(batch, time, mixer.core.channels, dtype=dtype, device=DEVICE)
    raw, y = mixer.terms.from_input(x), torch.zeros_like(x)
    step = FusedStep("triton", mixer, x, raw, y, PREFIXES)
    for _ in range(3):
        expected, found = composed(mixer, x, raw, y), step(y)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        items = (largest(expected - y) / largest(expected)).cummax(1).values
        torch.testing.assert_close(step.measure(y, found), items, rtol=10 * tolerance, atol=10 * tolerance)
        y = found


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("product", [True, False])
@torch.no_grad()
def test_agrees_in_float64(rank, product):
    for shape in ((1, 1, 1), (2, 5, 3)):
        check(make_mixer(shape[2], rank, product).double(), *shape[:2], tolerance=1e-12)


@pytest.mark.parametrize(
    "switches", [(True, False, True, True, False), (False, True, False, True, True), (False,) * 4 + (True,)]
)
@torch.no_grad()
def test_terms_may_read_the_input_alone(switches):
    check(make_mixer(3, 2, dependence=StateDependence(*switches)).double(), 2, 4, tolerance=1e-12)


@torch.no_grad()
def test_agrees_in_float32_and_reads_bfloat16_products():
    check(make_mixer(11), 2, 4, tolerance=1e-5)
    with torch.autocast(DEVICE, torch.bfloat16):
        check(make_mixer(11), 2, 4, tolerance=2e-2)


@torch.no_grad()
def test_divergence_is_seen():
    mixer = make_mixer(3).to(DEVICE)
    x = torch.randn(2, 4, 9, device=DEVICE)
    y = torch.randn_like(x)
    y[1, 2, 3] = torch.nan
    step = FusedStep("triton", mixer, x, mixer.terms.from_input(x), torch.zeros_like(x), PREFIXES)
    measured = step.measure(y, step(y))
    assert measured[1, 2:].isnan().all() and measured[1, :2].isfinite().all() and measured[0].isfinite().all()
