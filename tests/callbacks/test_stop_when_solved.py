"""Early stopping at a validation accuracy."""

from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from fprnn_lightning.callbacks import FindLearningRate, StopWhenSolved
from fprnn_lightning.cli import main
from fprnn_lightning.training import FixedLength


@pytest.mark.parametrize(("threshold", "steps"), [(0.01, 2), (1.0, 6)])
def test_it_stops_at_the_first_validation_that_passes(
    small_learner, small_task, small_trainer, threshold, steps, capsys
):
    trainer = small_trainer(
        callbacks=[StopWhenSolved(threshold)],
        max_steps=6,
        limit_val_batches=1.0,
        val_check_interval=2,
        num_sanity_val_steps=1,
    )
    trainer.fit(small_learner(), small_task())
    assert trainer.global_step == steps
    assert (f"solved after step {steps}: " in capsys.readouterr().out) == (steps == 2)


@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_bad_thresholds_are_refused(threshold):
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        StopWhenSolved(threshold)


def test_a_solved_run_is_tested(tmp_path):
    part = Path(__file__).parents[2] / "configs" / "extra" / "stop_when_solved.yaml"
    small = {
        "data": {"class_path": "WordProblem", "init_args": {"group": "Z2", "train_length": 4, "test_lengths": [4]}},
        "model": {
            "mixer": "LSTMMixer",
            "width": 16,
            "learning_rate": 0.03,
            "curriculum": {"class_path": "FixedLength", "init_args": {"length": 4}},
        },
        "trainer": {"max_steps": 400, "val_check_interval": 50, "accelerator": "cpu"},
    }
    small["data"]["init_args"]["validation_lengths"] = [4]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    configs = ["--config", str(tmp_path / "small.yaml"), "--config", str(part)]
    assert main(["fit", *configs, "--trainer.default_root_dir", str(tmp_path)]) == 0
    (curve,) = tmp_path.rglob("length_curve.csv")
    assert torch.load(curve.with_name("last.ckpt"))["global_step"] < 400
    assert curve.read_text().splitlines()[1].startswith("4,1.0")


class Files(Callback):
    """Each rank writes at which step it ended and at which learning rate."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        (self.folder / f"rank_{trainer.global_rank}").write_text(f"{trainer.global_step} {pl_module.learning_rate}")


def test_two_ranks_stop_together_at_the_learning_rate_that_they_found(
    small_learner, small_task, small_trainer, tmp_path
):
    small_trainer(
        strategy="ddp_spawn",
        devices=2,
        max_steps=8,
        val_check_interval=2,
        limit_val_batches=1.0,
        callbacks=[FindLearningRate(1e-4, steps=40), StopWhenSolved(0.01), Files(tmp_path)],
    ).fit(small_learner(learning_rate=0.5, curriculum=FixedLength(1)), small_task(validation_sequences=32))
    first, second = ((tmp_path / f"rank_{rank}").read_text() for rank in range(2))
    assert first == second
    step, rate = first.split()
    assert step == "2"
    assert float(rate) < 0.5
