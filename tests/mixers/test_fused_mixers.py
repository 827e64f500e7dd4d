"""What the fused iterations of all cores have in common, and fixed-point mixers with and without it.

Any memory layout, divergence; outputs, gradients and reports.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from test_fused_selective_step import make_mamba
from test_fused_step import composed, inputs, make_mixer, make_step
from torch import Tensor

from fprnn_lightning.mixers import fixed_point
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.fused_step import FusedStep
from fprnn_lightning.mixers.recurrent import StateDependence
from fprnn_lightning.solvers import Stopping
from fprnn_lightning.solvers.gradients import Implicit, OneStep


def outputs_and_gradients(mixer: FixedPointMixer, x: Tensor) -> dict[str, Tensor]:
    mixer.zero_grad()
    x = x.clone().requires_grad_()
    y = mixer(x)
    y.float().sin().sum().backward()
    report = {name: items.double() for name, items in mixer.diagnostics().items()}
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in mixer.named_parameters()} | report


every_core = pytest.mark.parametrize(
    "make", [make_mixer, partial(make_mamba, convolution=2)], ids=["FP-RNN", "FP-Mamba"]
)


@pytest.mark.parametrize(("make", "tolerance"), [(make_mixer, 1e-12), (make_mamba, 1e-11)], ids=["FP-RNN", "FP-Mamba"])
@torch.no_grad()
def test_tensors_may_lie_in_any_way(make, tolerance):
    torch.manual_seed(0)
    mixer = make(5).double()
    x, raw = inputs(mixer, 4, 7)
    y = torch.randn_like(x)
    step = make_step(mixer, *(each.mT.contiguous().mT for each in (x, raw)), torch.zeros_like(x))
    expected = composed(mixer, x, raw, y)
    for how in (lambda y: y.transpose(0, 1).contiguous().transpose(0, 1), lambda y: y.mT.contiguous().mT):
        torch.testing.assert_close(step(how(y)), expected, rtol=tolerance, atol=1e-12)


@every_core
@torch.no_grad()
def test_divergence_is_seen_and_stays_in_its_sequence(make):
    torch.manual_seed(0)
    mixer = make(6)
    x, raw = inputs(mixer, 3, 5)
    y = torch.randn_like(x)
    y[1, 2, 3] = torch.nan
    step = make_step(mixer, x, raw, torch.zeros_like(x))
    f_y = step(y)
    measured = step.measure(y, f_y)
    assert measured[1, 2:].isnan().all() and measured[1, :2].isfinite().all() and measured[[0, 2]].isfinite().all()
    assert f_y[[0, 2]].isfinite().all() and f_y[1, 2:].isnan().all()


@every_core
@pytest.mark.parametrize("rule", [OneStep(), Implicit(tolerance=1e-10)], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("switches", [(True,) * 5, (True, False, True, True, False, True), (False,) * 4 + (True,)])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_mixer_has_the_same_outputs_gradients_and_report(make, rule, training, switches, autocast, monkeypatch):
    torch.manual_seed(0)
    options = {"dependence": StateDependence(*switches), "gradient": rule, "stopping": Stopping(1e-3)}
    mixer = make(5, 2, **options).train(training)
    mixer = mixer if autocast else mixer.double()
    x = torch.randn(4, 9, 5, dtype=torch.float32 if autocast else torch.float64)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        fused = outputs_and_gradients(mixer, x)
        monkeypatch.setattr(fixed_point, "fused_step", lambda *_, **__: None)
        plain = outputs_and_gradients(mixer, x)
    for name in fused.keys() - (mixer.diagnostics().keys() if autocast else set()):
        scale = plain[name].abs().max()
        allowed = (0.05 if autocast else 1e-9) * scale + 1e-12
        assert (fused[name] - plain[name]).abs().max() <= allowed, name


@every_core
def test_the_mixer_does_use_it(make, monkeypatch):
    calls = []
    call = FusedStep.__call__
    monkeypatch.setattr(FusedStep, "__call__", lambda step, y: calls.append(y) or call(step, y))
    mixer = make(4, train_iterations=5, stopping=Stopping(0.0))
    mixer(torch.randn(2, 3, 4)).sum().backward()
    assert len(calls) == 4  # and the last one is recorded
