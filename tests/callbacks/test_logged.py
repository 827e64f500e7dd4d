"""What the callbacks log in training: solver report, gradient norm, throughput."""

import itertools

import pytest
from lightning.pytorch import Callback
from torch.nn.utils import get_total_norm

from fprnn_lightning.callbacks import GradientNorm, SolverReport, Throughput
from fprnn_lightning.training import FixedLength, ProgressiveLengths


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


@pytest.fixture
def tokens_per_second(small_learner, small_task, small_trainer, monkeypatch):
    """Trains with a clock that is read before the first batch of a window and after every step: n² at reading n."""

    def run(window, curriculum=None, **options):
        logged = []

        class Logged(Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                if trainer.global_step > len(logged):
                    logged.append(trainer.callback_metrics["train/tokens_per_second"].item())

        clock = itertools.count()
        monkeypatch.setattr("fprnn_lightning.callbacks.throughput.perf_counter", lambda: float(next(clock)) ** 2)
        trainer = small_trainer(callbacks=[Throughput(window), Logged()], **options)
        task = small_task(batch_size=16 * trainer.accumulate_grad_batches)
        trainer.fit(small_learner(curriculum=curriculum or FixedLength(8)), task)
        return logged

    return run


def test_throughput_counts_all_batches_of_an_accumulated_step(tokens_per_second):
    tokens = 3 * 16 * 8
    expected = [tokens / 1, 2 * tokens / 4, 2 * tokens / (9 - 1), 2 * tokens / (16 - 4)]
    assert tokens_per_second(2, accumulate_grad_batches=3) == pytest.approx(expected)


def test_throughput_counts_the_tokens_that_are_left_by_the_curriculum(tokens_per_second):
    curriculum = ProgressiveLengths(2, 5, threshold=0.01, smoothing=0.0)  # 2, 3, 4, 5, or an equal one if all is wrong
    expected = [16 * 2 / 1, 16 * (2 + 3) / 4, 16 * (3 + 4) / (9 - 1), 16 * (4 + 5) / (16 - 4)]
    assert tokens_per_second(2, curriculum) == pytest.approx(expected)


def test_throughput_leaves_out_validation(tokens_per_second):
    rates = tokens_per_second(4, val_check_interval=2, limit_val_batches=1.0)
    tokens = 16 * 8  # the clock is read anew before the third step, as 3² = 9
    assert rates == pytest.approx([tokens, 2 * tokens / 4, tokens / (16 - 9), 2 * tokens / (25 - 9)])


def test_throughput_leaves_out_validation_within_an_accumulated_step(tokens_per_second):
    rates = tokens_per_second(4, val_check_interval=2, limit_val_batches=1.0, accumulate_grad_batches=3, max_steps=2)
    batch = 16 * 8  # validated after batches 2, 4, 6: what is left of the steps are the batches 3 and 5, 6
    assert rates == pytest.approx([batch / (4 - 1), 2 * batch / (16 - 9)])


def test_throughput_of_a_resumed_run_is_of_its_own_steps(
    small_learner, small_task, small_trainer, monkeypatch, tmp_path
):
    first = small_trainer(callbacks=[Throughput()], max_steps=3)
    first.fit(small_learner(), small_task())
    first.save_checkpoint(tmp_path / "a.ckpt")
    clock = itertools.count()
    monkeypatch.setattr("fprnn_lightning.callbacks.throughput.perf_counter", lambda: float(next(clock)))
    resumed = small_trainer(callbacks=[Throughput()], max_steps=5)
    resumed.fit(small_learner(), small_task(), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert next(clock) == 3
    assert resumed.callback_metrics["train/tokens_per_second"].item() == pytest.approx(2 * 16 * 8 / 2)
