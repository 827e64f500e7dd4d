"""The LightningModule that trains a sequence model on labelled sequences: cross-entropy at every scored position of the
first `curriculum.length` tokens, AdamW with weight decay on matrices only, and accuracies at a list of lengths.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from fprnn_lightning.mixers.base import SequenceMixer
from fprnn_lightning.model import SequenceModel
from fprnn_lightning.training.curriculum import Curriculum, ProgressiveLengths
from fprnn_lightning.training.metrics import (
    ACCURACIES,
    IGNORED,
    LengthAccuracy,
    last_labels,
    last_token_accuracy,
    token_accuracy,
)
from fprnn_lightning.training.schedules import Schedule, WarmupHoldCosine

Batch = tuple[Tensor, Tensor]  # tokens (B, T), targets (B, T), -100 = not scored


class SequenceLearner(LightningModule):
    """A sequence model and how it is trained.

    Args:
        mixer: the sequence mixer of every layer.
        vocab_size: tokens and labels; set by the task.
        width: channels of the residual stream.
        layers: number of blocks.
        mlp_ratio: hidden channels of each block's MLP per channel of `width`; 0 leaves the MLPs out.
        learning_rate: of AdamW, before the schedule's factor.
        weight_decay: of AdamW; not on norms, biases, embeddings and what a mixer exempts.
        betas: of AdamW.
        schedule: how the learning rate goes over the optimiser steps.
        curriculum: to how many tokens the training sequences are cut.
        labels: what is learnt from a training sequence: "every" scored position, or the "last" that the curriculum's
            cut leaves, the whole sequence having one label. Evaluation is the same for both: a causal model's label at
            a position is that of the sequence that ends there, so the last-token accuracy at a length is the accuracy
            on sequences of that length with one label; the validation loss is the mean over all of these lengths.
        validation_lengths: tokens, ascending; set by the task.
        test_lengths: tokens, ascending; set by the task.
        chance: accuracy of a guess, which is 0 on the scale of scaled_accuracy; set by the task.
    """

    def __init__(
        self,
        mixer: Callable[[int], SequenceMixer],
        vocab_size: int,
        width: int = 128,
        layers: int = 1,
        mlp_ratio: float = 0.0,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        schedule: Schedule = WarmupHoldCosine(),  # noqa: B008 (frozen)
        curriculum: Curriculum = ProgressiveLengths(),  # noqa: B008 (copied below)
        labels: Literal["every", "last"] = "every",
        validation_lengths: Sequence[int] = (16, 50),
        test_lengths: Sequence[int] = (16, 32, 50, 64, 128, 256, 512),
        chance: float = 0.0,
    ) -> None:
        super().__init__()
        if learning_rate < 0:
            raise ValueError(f"learning_rate is {learning_rate:g}, must not be negative")
        self.save_hyperparameters(logger=False)
        for name in ("mixer", "schedule", "curriculum"):  # the command line gives plain types; objects stay out of
            if not isinstance(self.hparams[name], dict):  # checkpoints, which load with weights_only=True
                del self.hparams[name]
        self.model = SequenceModel(vocab_size, mixer, width, layers, mlp_ratio)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = betas
        self.schedule = schedule
        self.curriculum = deepcopy(curriculum)
        self.labels = labels
        self.validation_accuracy = LengthAccuracy(validation_lengths)
        self.test_accuracy = LengthAccuracy(test_lengths)
        self.chance = chance

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the label at every position: tokens (B, T) -> (B, T, V)."""
        return self.model(tokens)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes this step the last, and a logged one, if the learning rate will have come to 0 for good."""
        step = self.global_step + 1
        steps_now = (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0
        if steps_now and self.schedule.finished(step, self.curriculum.steps_at_end(step)):
            self.trainer.should_stop = True

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Learns from the first `curriculum.length` tokens of a batch.

        Returns:
            The loss and, for callbacks, the number of tokens.

        Raises:
            ValueError: if the curriculum ends beyond the training sequences.
        """
        length, available = self.curriculum.length(self.global_step), batch[0].shape[1]
        if self.curriculum.end > available:
            raise ValueError(
                f"the curriculum ends at length {self.curriculum.end}, "
                f"but the training sequences have {available} tokens"
            )
        tokens, targets = (part[:, :length] for part in batch)
        if self.labels == "last":
            targets = last_labels(targets)
        logits = self(tokens)
        loss = _loss(logits, targets)
        predictions = logits.detach().argmax(-1)
        accuracies = token_accuracy(predictions, targets), last_token_accuracy(predictions, targets)
        summary = self.trainer.strategy.reduce(torch.stack([loss.detach(), *accuracies]), reduce_op="mean")
        if self.trainer._logger_connector.should_update_logs:  # a value logged in vain costs half a millisecond
            self.log_dict(
                {
                    "train/loss": summary[0],
                    "train/token_accuracy": summary[1],
                    "train/last_token_accuracy": summary[2],
                    "train/length": float(length),
                    "train/learning_rate": self.optimizers().param_groups[0]["lr"],
                }
            )
        self.curriculum.observe(summary[2], self.global_step)
        return {"loss": loss, "tokens": tokens.numel()}

    def on_validation_epoch_start(self) -> None:
        self.validation_accuracy.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, targets = batch
        logits = self(tokens)
        self.log("validation/loss", _loss(logits, targets), batch_size=len(tokens), sync_dist=True)
        self.validation_accuracy.update(logits.argmax(-1), targets)

    def on_validation_epoch_end(self) -> None:
        self._log_accuracy("validation", self.validation_accuracy)

    def on_test_epoch_start(self) -> None:
        self.test_accuracy.reset()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, targets = batch
        self.test_accuracy.update(self(tokens).argmax(-1), targets)

    def on_test_epoch_end(self) -> None:
        self._log_accuracy("test", self.test_accuracy)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The likeliest label at every position: tokens (B, T) -> (B, T)."""
        return self(batch).argmax(-1)

    def configure_optimizers(self) -> dict[str, Any]:
        groups = weight_decay_groups(self.model, self.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas)
        scheduler = LambdaLR(optimizer, lambda step: self.schedule.factor(step, self.curriculum.steps_at_end(step)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["curriculum"] = self.curriculum.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.curriculum.load_state_dict(checkpoint["curriculum"])

    def _log_accuracy(self, split: str, accuracy: LengthAccuracy) -> None:
        values = accuracy.compute()
        values["scaled_accuracy"] = tuple(map(self._scaled, values["last_token_accuracy"]))
        for name in (*ACCURACIES, "scaled_accuracy"):
            by_length = zip(accuracy.lengths, values[name], strict=True)
            self.log_dict({f"{split}/{name}_{length}": value for length, value in by_length}, sync_dist=True)

    def _scaled(self, accuracy: Tensor) -> Tensor:
        return (accuracy - self.chance) / (1 - self.chance)


def weight_decay_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups with and without weight decay.

    Without: parameters of fewer than two dimensions (biases, norms), embeddings, and parameters that say
    `no_weight_decay = True` on themselves.
    """
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    decayed, exempt = [], []
    for parameter in module.parameters():
        without = parameter.ndim < 2 or id(parameter) in embeddings or getattr(parameter, "no_weight_decay", False)
        (exempt if without else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
