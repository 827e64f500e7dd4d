"""Fixed-point mixers with the fused iteration against the same without: outputs, gradients, and what they report."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from test_fused_selective_step import make_mamba
from test_fused_step import make_mixer
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
