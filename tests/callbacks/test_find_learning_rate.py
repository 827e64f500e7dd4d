"""A learning rate found before training is the one that is used, and the search leaves no other trace."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger

from fprnn_lightning.callbacks import FindLearningRate
from fprnn_lightning.callbacks.find_learning_rate import range_test, suggest
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.solvers.caps import RandomCap
from fprnn_lightning.training import ProgressiveLengths, WarmupConstant

WARMUP = 4


class Trace(Callback):
    """The losses and learning rates of every step, and random numbers."""

    def __init__(self):
        self.losses, self.rates, self.random = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.random.append(torch.rand(()).item())


@pytest.fixture
def fit(small_learner, small_task, small_trainer):
    """Trains a learner that has whatever a search might move: a curriculum, random caps, states to start from."""

    def run(*callbacks, ckpt_path=None, **options):
        learner_options = {"learning_rate": options.pop("learning_rate", 1e-3)}
        mixer = partial(FixedPointMixer, train_iterations=RandomCap(), warm_start=options.pop("warm_start", True))
        course = {"curriculum": ProgressiveLengths(2, 8, 0.1, 0.5), "schedule": WarmupConstant(WARMUP)}
        learner = small_learner(mixer=mixer, **course, **learner_options)
        trace = Trace()
        trainer = small_trainer(callbacks=[*callbacks, trace], **{"max_steps": 6} | options)
        trainer.fit(learner, small_task(), ckpt_path=ckpt_path, weights_only=True)
        return trainer, learner, trace

    return run


search = partial(FindLearningRate, lowest=1e-4, steps=30)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_run_is_the_same_as_with_the_found_rate_configured(fit, accumulated):
    options = {"accumulate_grad_batches": accumulated}
    _, learner, found = fit(search(), **options)
    rate = learner.learning_rate
    assert rate != 1e-3
    assert learner.hparams.learning_rate == rate
    assert found.rates == pytest.approx([rate * min(1, (step + 1) / WARMUP) for step in range(6)])
    _, given_learner, given = fit(learning_rate=rate, **options)
    assert (found.losses, found.rates, found.random) == (given.losses, given.rates, given.random)
    torch.testing.assert_close(learner.state_dict(), given_learner.state_dict(), rtol=0, atol=0)
    assert learner.curriculum.state_dict() == given_learner.curriculum.state_dict()


class Searched(Callback):
    """Notes the losses of a search."""

    def on_fit_start(self, trainer, pl_module):
        self.losses = range_test(trainer, pl_module, np.geomspace(1e-4, 1e-2, 12))
        self.again = range_test(trainer, pl_module, np.geomspace(1e-4, 1e-2, 12))


def test_accumulated_batches_share_random_caps_in_a_search(fit):
    whole, parts = Searched(), Searched()
    fit(whole, max_steps=1, warm_start=False)
    fit(parts, max_steps=1, warm_start=False, accumulate_grad_batches=2)
    assert parts.losses == parts.again
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)


def test_it_is_told_drawn_and_nothing_else_is_left(fit, tmp_path, capsys):
    trainer, learner, _ = fit(search(), logger=TensorBoardLogger(tmp_path, "", "run"))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("learning rate"))
    assert f"learning rate {learner.learning_rate:.3g} found after" in line
    folder = Path(trainer.log_dir)
    assert Path(trainer.default_root_dir, "learning_rate.png").read_bytes().startswith(b"\x89PNG")
    names = {path.name.partition(".")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"events", "hparams", "learning_rate"}
    assert b"learning_rate" in b"".join(path.read_bytes() for path in folder.glob("events*"))


def test_the_configured_rate_stays_where_none_is_found(fit, capsys):
    _, learner, trace = fit(FindLearningRate(1e-12, 1e-11, steps=10))
    assert "no learning rate found after 10 steps from 1.0e-12 to 1.0e-11, it stays 0.001" in capsys.readouterr().out
    assert learner.learning_rate == learner.hparams.learning_rate == 1e-3
    assert trace.rates[-1] == pytest.approx(1e-3)
    assert trace.losses == fit()[2].losses


def test_a_resumed_fit_keeps_the_rate_and_does_not_search(fit, tmp_path, capsys):
    _, learner, whole = fit(search())
    trainer, _, _ = fit(search(), max_steps=3)
    trainer.save_checkpoint(tmp_path / "kept.ckpt")
    capsys.readouterr()
    _, resumed, rest = fit(search(), ckpt_path=tmp_path / "kept.ckpt")
    assert "learning rate" not in capsys.readouterr().out
    assert resumed.learning_rate == resumed.hparams.learning_rate == learner.learning_rate
    assert rest.rates == whole.rates[3:]


def test_the_saved_rate_is_the_one_used(fit, tmp_path):
    trainer, learner, _ = fit(search())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert (
        torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]["learning_rate"] == learner.learning_rate
    )


def test_the_suggestion_is_a_tenth_of_the_rate_of_the_lowest_loss():
    rates = np.geomspace(1e-5, 1, 101)
    losses = 2 + np.abs(np.log10(rates) + 2)  # lowest at 1e-2
    noise = np.random.default_rng(0).normal(0, 0.02, 101)
    assert suggest(rates, losses) == pytest.approx(1e-3)
    assert suggest(rates, losses + noise) == pytest.approx(1e-3, rel=0.4)
    assert suggest(rates, losses[::-1]) == pytest.approx(1e-4)
    assert suggest(rates, np.linspace(2, 3, 101)) is None
    assert suggest(rates, np.full(101, 2.0)) is None
    assert suggest(rates[:5], losses[:5]) is None


@pytest.mark.parametrize("options", [{"lowest": 0.0}, {"lowest": 1.0, "highest": 0.1}, {"steps": 9}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match="FindLearningRate"):
        FindLearningRate(**options)
