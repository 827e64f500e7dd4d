"""A non-finite loss stops the run before it reaches the weights, and the message says where it came from."""

import re

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from fprnn_lightning.callbacks import NonFiniteError, NonFiniteGuard
from fprnn_lightning.mixers.lstm import LSTMMixer


class Poison(Callback):
    """Sets one number of a parameter to infinity after two steps."""

    def __init__(self, name):
        self.name = name

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            pl_module.get_parameter(self.name).data.view(-1)[0] = torch.inf


class Overflow(nn.Module):
    """The identity for two forwards, then not a number."""

    forwards = 0

    def forward(self, x):
        self.forwards += 1
        return x if self.forwards <= 2 else x * torch.inf


class OverflowingMixer(LSTMMixer):
    def __init__(self, width):
        super().__init__(width)
        self.overflow = Overflow()

    def forward(self, x):
        return super().forward(self.overflow(x))


def test_a_parameter_is_named(small_learner, small_task, small_trainer):
    trainer = small_trainer(callbacks=[Poison("model.head.weight"), NonFiniteGuard()])
    with pytest.raises(
        NonFiniteError,
        match=r"the loss is (nan|inf) at step 2; first not finite: parameter model\.head\.weight; "
        r"last good checkpoint: none yet",
    ):
        trainer.fit(small_learner(), small_task())


def test_an_activation_is_named_and_the_weights_are_spared(small_learner, small_task, small_trainer):
    learner = small_learner(mixer=OverflowingMixer)
    with pytest.raises(NonFiniteError, match=r"step 2; first not finite: output of model\.blocks\.0\.mixer\.overflow;"):
        small_trainer(callbacks=[NonFiniteGuard()]).fit(learner, small_task())
    assert all(parameter.isfinite().all() for parameter in learner.parameters())


def test_the_last_good_checkpoint_is_named(small_learner, small_task, small_trainer, tmp_path):
    """The checkpoint of step 2 was written after the poison, so it is not good; that of step 1 is."""
    keep = ModelCheckpoint(tmp_path / "checkpoints", "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    trainer = small_trainer(callbacks=[Poison("model.head.weight"), NonFiniteGuard(), keep], enable_checkpointing=True)
    good = re.escape(str(tmp_path / "checkpoints" / "step=1.ckpt"))
    with pytest.raises(NonFiniteError, match=f"last good checkpoint: {good}$"):
        trainer.fit(small_learner(), small_task())
    assert (tmp_path / "checkpoints" / "step=2.ckpt").exists()


def test_a_finite_run_is_left_alone(small_learner, small_task, small_trainer):
    trainer = small_trainer(callbacks=[NonFiniteGuard()])
    trainer.fit(small_learner(), small_task())
    assert trainer.global_step == 4
