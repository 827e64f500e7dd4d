"""What the callbacks log in training: solver report, gradient norm, throughput."""

import itertools

import pytest
from lightning.pytorch import Callback
from torch.nn.utils import get_total_norm

from fprnn_lightning.callbacks import GradientNorm, SolverReport, Throughput


def test_solver_report_per_layer(small_learner, small_task, small_trainer, iterating_mixer):
    trainer = small_trainer(callbacks=[SolverReport()])
    trainer.fit(small_learner(mixer=iterating_mixer, layers=2), small_task())
    logged = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("solver/")}
    expected = {"iterations": 3.0, "residual": 0.5, "converged": 0.75}
    assert logged == {f"solver/layer_{layer}/{name}": value for layer in (0, 1) for name, value in expected.items()}


def test_solver_report_asks_only_where_it_logs(small_learner, small_task, small_trainer, iterating_mixer):
    trainer = small_trainer(callbacks=[SolverReport()], max_steps=6, log_every_n_steps=3)
    trainer.fit(small_learner(mixer=iterating_mixer), small_task())
    assert iterating_mixer.asked == 2


def test_solver_report_of_a_test_set_warns_of_what_did_not_converge(
    small_learner, small_task, small_trainer, iterating_mixer
):
    trainer = small_trainer(callbacks=[SolverReport()])
    with pytest.warns(UserWarning, match=r"layer 0: 1 of 4 test sequences have not converged after 4 iterations"):
        trainer.test(small_learner(mixer=iterating_mixer), small_task(test_sequences=16), verbose=False)
    assert trainer.callback_metrics["test/solver/layer_0/converged"].item() == 0.75


def test_nothing_is_reported_of_mixers_that_do_not_iterate(small_learner, small_task, small_trainer):
    trainer = small_trainer(callbacks=[SolverReport()])
    trainer.fit(small_learner(), small_task())
    assert not [name for name in trainer.callback_metrics if name.startswith("solver/")]


def test_gradient_norm_is_the_one_before_clipping(small_learner, small_task, small_trainer):
    class Norms(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.before = get_total_norm([parameter.grad for parameter in pl_module.parameters()]).item()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.after = get_total_norm([parameter.grad for parameter in pl_module.parameters()]).item()

    norms = Norms()
    trainer = small_trainer(callbacks=[GradientNorm(), norms], gradient_clip_val=1e-3)
    trainer.fit(small_learner(), small_task())
    assert norms.after == pytest.approx(1e-3, rel=1e-2)
    assert trainer.callback_metrics["train/gradient_norm"].item() == pytest.approx(norms.before)


def test_throughput_over_the_window(small_learner, small_task, small_trainer, monkeypatch):
    clock = itertools.count()  # read once before the first step and once after every step; step n ends at n²
    monkeypatch.setattr("fprnn_lightning.callbacks.throughput.perf_counter", lambda: float(next(clock)) ** 2)
    trainer = small_trainer(callbacks=[Throughput(window=2)], max_steps=4)
    trainer.fit(small_learner(), small_task())
    assert trainer.callback_metrics["train/tokens_per_second"].item() == pytest.approx(2 * 16 * 8 / (4**2 - 2**2))
