"""The LightningModule that trains a sequence model on labelled sequences: cross-entropy at every scored position of the
first `curriculum.length` tokens, AdamW with weight decay on matrices only, and accuracies at a list of lengths.

    bits per label (per byte, of text) = mean over the scored positions of -log2 p(label)
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from fprnn_lightning.mixers.base import SequenceMixer
from fprnn_lightning.model import SequenceModel
from fprnn_lightning.scan import TimeSlices
from fprnn_lightning.training.curriculum import Curriculum, ProgressiveLengths
from fprnn_lightning.training.metrics import (
    IGNORED,
    AnswerAccuracy,
    LengthAccuracy,
    MeanOverPositions,
    count_by_end,
    first_scored,
    last_labels,
    last_token_accuracy,
)
from fprnn_lightning.training.schedules import Schedule, WarmupHoldCosine
from fprnn_lightning.training.sharding import Sharded, shard

Batch = tuple[Tensor, Tensor]  # tokens (B, T), targets (B, T), -100 = not scored
# the same and (2, T), of all batches of the step: scored positions among the first t tokens, sequences with one
TrainingBatch = tuple[Tensor, Tensor, Tensor]


class Lesson(NamedTuple):
    """What a rank has learnt from its part of a batch, all of its sequences or a slice in time of them.

    Args:
        loss: scalar.
        logits: (B, T, V).
        targets: (B, T).
        scored: the scored positions of all batches of the step, a scalar.
        slices: the slices in time that the part is one of, None if its sequences are whole.
    """

    loss: Tensor
    logits: Tensor
    targets: Tensor
    scored: Tensor
    slices: TimeSlices | None


class SequenceLearner(LightningModule):
    """A sequence model and how it is trained.

    Args:
        mixer: the sequence mixer of every layer.
        vocab_size: tokens and labels; set by the task.
        width: channels of the residual stream.
        layers: number of blocks.
        mlp_ratio: hidden channels of each block's MLP per channel of `width`; 0 leaves the MLPs out.
        recompute: whether backward computes the inside of each block again rather than that forward keeps it, which
            takes the memory of one block instead of all, and the time of another forward, iteration included.
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
        prompt_overhead: where evaluation is of answers to prompts, tokens of a prompt that do not count for its length,
            else null; set by the task. Testing then generates the answers too, token by token, after each prompt.
        unit: what a label is, as evaluation logs bits_per_<unit>; set by the task.
        compile: whether torch.compile makes code of the model, for any length at once; what iterates or walks through
            time stays as it is, with the kernels it has. Numbers agree to rounding, checkpoints are the same.
    """

    def __init__(
        self,
        mixer: Callable[[int], SequenceMixer],
        vocab_size: int,
        width: int = 128,
        layers: int = 1,
        mlp_ratio: float = 0.0,
        recompute: bool = False,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        schedule: Schedule = WarmupHoldCosine(),  # noqa: B008 (frozen)
        curriculum: Curriculum = ProgressiveLengths(),  # noqa: B008 (copied below)
        labels: Literal["every", "last"] = "every",
        validation_lengths: Sequence[int] = (16, 50),
        test_lengths: Sequence[int] = (16, 32, 50, 64, 128, 256, 512),
        chance: float = 0.0,
        prompt_overhead: int | None = None,
        unit: str = "label",
        compile: bool = False,
    ) -> None:
        super().__init__()
        if learning_rate < 0:
            raise ValueError(f"learning_rate is {learning_rate:g}, must not be negative")
        self.save_hyperparameters(logger=False)
        for name in ("mixer", "schedule", "curriculum"):  # the command line gives plain types; objects stay out of
            if not isinstance(self.hparams[name], dict):  # checkpoints, which load with weights_only=True
                del self.hparams[name]
        self.model = SequenceModel(vocab_size, mixer, width, layers, mlp_ratio, recompute)
        if compile:
            self.model.compile(dynamic=True)  # in place: a wrapper would change the names of the weights
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = betas
        self.schedule = schedule
        self.curriculum = deepcopy(curriculum)
        self.labels = labels
        prompted = prompt_overhead is not None
        measure = partial(AnswerAccuracy, prompt_overhead=prompt_overhead) if prompted else LengthAccuracy
        self.validation_accuracy = measure(validation_lengths, chance=chance)
        self.test_accuracy = measure(test_lengths, chance=chance)
        self.generated_accuracy = measure(test_lengths, chance=chance) if prompted else None
        self.unit = unit
        self.mean_loss = MeanOverPositions()
        self.bits = MeanOverPositions()
        self._counts: Tensor | None = None  # of the batches of the optimiser step so far

    def setup(self, stage: str) -> None:
        """Has all ranks decide together, from before the first callback that may train as a fit starts."""
        if stage == "fit" and self.trainer.world_size > 1:
            for block in self.model.blocks:
                block.mixer.decide_jointly()

    def configure_model(self) -> None:
        """Cuts the weights for a strategy that shards them."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the label at every position: tokens (B, T) -> (B, T, V)."""
        return self.model(tokens)

    @torch.no_grad()
    def predict(self, tokens: Tensor) -> Tensor:
        """The likeliest label at every position: tokens (B, T) -> (B, T)."""
        return self(tokens).argmax(-1)

    def generate(self, prompt: Tensor, length: int) -> Tensor:
        """Continues prompts greedily: prompt (B, T) -> the tokens that follow (B, length), T and length at least 1."""
        return self.model.generate(prompt, length)

    def learn(self, batch: TrainingBatch, length: int, goes_on: bool = False) -> Lesson:
        """The loss on a batch at a length of the curriculum.

        Gradients are averaged over ranks and accumulated batches, so the loss is the sum over the scored positions of
        the batch, or of this rank's slice of it, divided by their average number: the average of these losses is the
        mean over all positions.

        Args:
            batch: tokens, targets and how many are scored.
            length: tokens to which the sequences are cut.
            goes_on: whether the batch is accumulated to the one before, for the same optimiser step.
        """
        if goes_on:
            for block in self.model.blocks:
                block.mixer.go_on_with_step()
        tokens, targets, (positions, sequences) = batch[0][:, :length], batch[1][:, :length], batch[2][:, length - 1]
        if self.labels == "last":
            targets, positions = last_labels(targets), sequences
        with self.time_slices() as slices:
            if slices is not None:
                tokens, targets = slices.cut(tokens), slices.cut(targets)
            logits = self(tokens)
        parts = self._parts()
        loss = self.loss(logits, targets, positions / parts if parts > 1 else positions)
        return Lesson(loss, logits, targets, positions, slices)

    def time_slices(self) -> AbstractContextManager[TimeSlices | None]:
        """A context in which sequences are slices in time of longer ones, if the strategy cuts them."""
        strategy = self.trainer.strategy
        return strategy.time_slices() if isinstance(strategy, Sharded) else nullcontext()

    def check_slices(self, slices: int) -> None:
        """Says whether every training sequence can be cut into so many slices of time.

        Raises:
            ValueError: if not.
        """
        if slices == 1:
            return
        for block in self.model.blocks:
            if not block.mixer.can_be_sliced:
                name = type(block.mixer).__name__
                raise ValueError(f"slices is {slices}, but {name} needs whole sequences; give another model.mixer")
        if self.curriculum.start < slices:
            raise ValueError(
                f"slices is {slices}, but the curriculum starts at length {self.curriculum.start}; it must start at "
                f"{slices} or more"
            )

    def loss(self, logits: Tensor, targets: Tensor, scored: Tensor) -> Tensor:
        """Cross-entropy in nats, its sum over the scored positions divided by a number.

        Args:
            logits: (B, T, V).
            targets: (B, T).
            scored: scalar; the number of scored positions gives the mean.
        """
        total = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / scored

    def on_train_start(self) -> None:
        """Ends a resumed run at once if the learning rate has come to 0 for good."""
        if self.schedule.finished(self.global_step, self.curriculum.steps_at_end(self.global_step)):
            self.trainer.should_stop = True

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes this step the last, and a logged one, if the learning rate will have come to 0 for good."""
        step = self.global_step + 1
        if self._steps_now() and self.schedule.finished(step, self.curriculum.steps_at_end(step)):
            self.trainer.should_stop = True

    def training_step(self, batch: TrainingBatch, batch_idx: int) -> dict[str, Any]:
        """Learns from the first `curriculum.length` tokens of a batch.

        Returns:
            The loss and, for callbacks, the number of tokens, of ranks that share them on average.

        Raises:
            ValueError: if the curriculum ends beyond the training sequences.
        """
        length, available = self.curriculum.length(self.global_step), batch[0].shape[1]
        if self.curriculum.end > available:
            raise ValueError(
                f"the curriculum ends at length {self.curriculum.end}, "
                f"but the training sequences have {available} tokens"
            )
        lesson = self.learn(batch, length, goes_on=self._counts is not None)
        self._count(lesson, length)
        if self._steps_now():
            self._conclude_step(length, lesson.scored)
        sharing = 1 if lesson.slices is None else lesson.slices.size
        return {"loss": lesson.loss, "tokens": len(batch[0]) * length / sharing}

    @torch.no_grad()
    def _count(self, lesson: Lesson, length: int) -> None:
        """Adds to what is known of the step so far: its loss, how many positions are right, sequences by end.

        A sequence in slices counts once in each with a scored position; the furthest end is that of whole sequences.
        """
        predictions, targets, slices = lesson.logits.argmax(-1), lesson.targets, lesson.slices
        totals, ends = torch.stack([lesson.loss, (predictions == targets).sum()]), count_by_end(predictions, targets)
        counts = torch.cat([totals, (ends if slices is None else slices.place(ends, length)).flatten()])
        self._counts = counts if self._counts is None else self._counts + counts

    def _conclude_step(self, length: int, scored: Tensor) -> None:
        """Tells log and curriculum of the whole step, of all ranks and accumulated batches."""
        counts = self.trainer.strategy.reduce(self._counts, reduce_op="sum")
        self._counts = None
        accuracy = last_token_accuracy(counts[2:].unflatten(0, (2, -1)))
        if self.trainer._logger_connector.should_update_logs:  # a value logged in vain costs half a millisecond
            self.log_dict(
                {
                    "train/loss": counts[0] / self._parts(),
                    "train/token_accuracy": counts[1] / scored,
                    "train/last_token_accuracy": accuracy,
                    "train/length": float(length),
                    "train/learning_rate": self.optimizers().param_groups[0]["lr"],
                }
            )
        self.curriculum.observe(accuracy, self.global_step)

    def _parts(self) -> int:
        """Over how many losses a step's gradients are averaged."""
        return self.trainer.world_size * self.trainer.accumulate_grad_batches

    def _steps_now(self) -> bool:
        """Whether the optimiser steps after this batch."""
        return not self.trainer.fit_loop._should_accumulate()

    def on_validation_epoch_start(self) -> None:
        self.validation_accuracy.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, targets = batch
        logits = self(tokens)
        loss = self._log_bits("validation", logits, targets)
        self.mean_loss.update(loss, (targets != IGNORED).sum())
        self.log("validation/loss", self.mean_loss, on_step=False, on_epoch=True)
        self.validation_accuracy.update(logits.argmax(-1), targets)

    def on_validation_epoch_end(self) -> None:
        self._log_by_length("validation", self.validation_accuracy.compute(), self.validation_accuracy.lengths)

    def on_test_epoch_start(self) -> None:
        self.test_accuracy.reset()
        if self.generated_accuracy is not None:
            self.generated_accuracy.reset()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, targets = batch
        if self.generated_accuracy is not None:  # first, as what mixers report is of their last forward
            self.generated_accuracy.update(generate_answers(self.model, tokens, targets), targets)
        logits = self(tokens)
        self._log_bits("test", logits, targets)
        self.test_accuracy.update(logits.argmax(-1), targets)

    def on_test_epoch_end(self) -> None:
        self._log_by_length("test", self.test_results(), self.test_accuracy.lengths)

    def test_results(self) -> dict[str, tuple[Tensor, ...]]:
        """Accuracies of the test so far and the number of `sequences`, each a scalar per test length.

        Where answers are generated, generated_token_accuracy and generated_sequence_accuracy are theirs.
        """
        results = self.test_accuracy.compute()
        if self.generated_accuracy is not None:
            generated = self.generated_accuracy.compute()
            results |= {f"generated_{name}": generated[name] for name in ("token_accuracy", "sequence_accuracy")}
        return results

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The likeliest label at every position: tokens (B, T) -> (B, T)."""
        return self.predict(batch)

    def configure_optimizers(self) -> dict[str, Any]:
        groups = weight_decay_groups(self.model, self.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas)
        scheduler = LambdaLR(optimizer, lambda step: self.schedule.factor(step, self.curriculum.steps_at_end(step)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["curriculum"] = self.curriculum.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.curriculum.load_state_dict(checkpoint["curriculum"])

    def _log_bits(self, split: str, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss in nats, which is logged in bits."""
        scored = (targets != IGNORED).sum()
        loss = self.loss(logits, targets, scored)
        self.bits.update(loss / math.log(2), scored)
        self.log(f"{split}/bits_per_{self.unit}", self.bits, on_step=False, on_epoch=True)
        return loss

    def _log_by_length(self, split: str, results: dict[str, tuple[Tensor, ...]], lengths: Sequence[int]) -> None:
        for name, values in results.items():
            if name != "sequences":
                by_length = zip(lengths, values, strict=True)
                measured = {f"{split}/{name}_{length}": value for length, value in by_length}
                self.log_dict(measured, sync_dist=True, reduce_fx="max")  # the same on all ranks; a mean would round


def generate_answers(model: SequenceModel, tokens: Tensor, targets: Tensor) -> Tensor:
    """What a model answers to prompts when it reads its own answer as it goes on, not the given one.

    Args:
        model: the model.
        tokens: (B, T), a prompt up to the first scored position, then the given answer.
        targets: (B, T), scored at successive positions.

    Returns:
        Predictions (B, T), 0 where nothing is scored.
    """
    predictions = torch.zeros_like(targets)
    answers = torch.stack([first_scored(targets), (targets != IGNORED).sum(1)], 1)
    for answer in answers.unique(dim=0):  # prompts of one length together
        rows, (first, length) = (answers == answer).all(1), answer.tolist()
        predictions[rows, first : first + length] = model.generate(tokens[rows, : first + 1], length)
    return predictions


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
