"""What a task is: labelled token sequences for training, validation and test.

Every batch is a pure function of (seed, split, index), drawn from SFC64(SeedSequence(seed, spawn_key=(split, index))).
Nothing depends on the number of workers, devices or accumulated batches, or on what was drawn before. Training batch
`index` is that of the optimiser step after `index` others: every device draws all of it and keeps its rows. Evaluation
batches are dealt out to the devices in turn. A resumed run continues its stream, on any number of devices.
"""

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

Split = Literal["train", "validation", "test"]
Batch = tuple[Tensor, Tensor]

IGNORED = -100  # a target that is not scored
PAPER_LENGTH = 50
BLOCK = 64  # evaluation sequences are generated this many at a time, whatever the batch size


class SequenceTask(LightningDataModule, ABC):
    """Labelled token sequences; a subclass says what they are in `generate`.

    Training is an endless stream. Evaluation sets are fixed: they depend on `seed` alone, not on batch sizes, workers
    or devices; more sequences are added at the end, and longer ones extend the shorter.

    Args:
        batch_size: Training sequences per optimiser step, over all devices and accumulated batches.
        train_length: Tokens of a training sequence.
        validation_lengths: Lengths, in tokens, at which validation measures; all are prefixes of the longest.
        test_lengths: The same for test; 50, the length the paper tests at, is added.
        validation_sequences: Sequences in the validation set.
        test_sequences: Sequences in the test set.
        evaluation_batch_size: Validation and test sequences per batch, at most. Devices take batches in turn, so where
            there are more devices than batches some have none.
        seed: Which stream and which evaluation sets; at least 0.
        workers: Processes that generate ahead on each device; 0 generates in the training process.

    Raises:
        ValueError: If a length, size or number is below its least value.
    """

    prefix_closed = True  # whether the first tokens of a sequence are a sequence too, so that a curriculum may cut it
    prompt_overhead: int | None = None  # if evaluation is of prompts and answers: tokens of a prompt beyond its length
    unit = "label"  # what a label is: the learner logs bits_per_<unit>

    def __init__(
        self,
        batch_size: int = 256,
        train_length: int = 16,
        validation_lengths: Sequence[int] = (16, 50),
        test_lengths: Sequence[int] = (16, 32, 50, 64, 128, 256, 512),
        validation_sequences: int = 1024,
        test_sequences: int = 1024,
        evaluation_batch_size: int = 256,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        super().__init__()
        sizes = {
            "batch_size": batch_size,
            "train_length": train_length,
            "validation_sequences": validation_sequences,
            "test_sequences": test_sequences,
            "evaluation_batch_size": evaluation_batch_size,
        }
        for least, options in ((1, sizes), (0, {"seed": seed, "workers": workers})):
            for option, value in options.items():
                if value is None or value < least:
                    raise ValueError(f"{option} must be at least {least}, got {value}.")
        for option, lengths in (("validation_lengths", validation_lengths), ("test_lengths", test_lengths)):
            if not lengths or min(lengths) < 1:
                raise ValueError(f"{option} must be one or more lengths of at least 1, got {lengths}.")
        self.batch_size = batch_size
        self.train_length = train_length
        self.validation_lengths = sorted(set(validation_lengths))
        self.test_lengths = sorted({*test_lengths, PAPER_LENGTH})
        self.validation_sequences = validation_sequences
        self.test_sequences = test_sequences
        self.evaluation_batch_size = evaluation_batch_size
        self.seed = seed
        self.workers = workers

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the task's folder in the logs."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens and labels are both below this number."""

    @property
    def chance(self) -> float:
        """The token accuracy of a guess."""
        return 1 / self.vocab_size

    @property
    def trained_length(self) -> int:
        """The longest length in training, on the scale of the evaluated lengths."""
        return self.train_length

    def tokens_at(self, length: int) -> int:
        """Tokens of an evaluation sequence measured at a length."""
        return length

    @abstractmethod
    def generate(self, generator: np.random.Generator, split: Split, sequences: int, length: int) -> Batch:
        """Draws sequences; all randomness comes from `generator`.

        From the same state of the generator, a longer draw must extend a shorter one; drawing time step by time step
        does. Only where sequences are not `prefix_closed` it need not.

        Args:
            generator: The source of all randomness.
            split: "train", "validation" or "test"; no sequence may belong to two of them.
            sequences: B, how many.
            length: T, tokens in each.

        Returns:
            Tokens (B, T) and targets (B, T), both int64; a target of -100 is not scored.
        """

    @classmethod
    def read_prompt(cls, text: str) -> list[int]:
        """The tokens that a person means by a text: their numbers, unless a task says otherwise.

        Raises:
            ValueError: If the text is anything else.
        """
        words = text.split()
        if unknown := [word for word in words if not word.isdecimal()]:
            raise ValueError(f"prompt: {unknown[0]!r} is not the number of a token, such as 0 1 2.")
        return [int(word) for word in words]

    @classmethod
    def show(cls, tokens: Sequence[int]) -> str:
        """Tokens as a person reads them; what `read_prompt` reads."""
        return " ".join(map(str, tokens))

    def batch(self, split: Split, index: int) -> Batch:
        """One batch of a split, a pure function of (seed, split, index).

        Args:
            split: "train", "validation" or "test".
            index: Its place in the stream, or in the evaluation set.

        Returns:
            Tokens (B, T) and targets (B, T), both int64; a target of -100 is not scored. T is what the longest length
            of the split takes.
        """
        if split == "train":
            return self._draw(split, index, self.batch_size, self.train_length)
        return self._evaluation_batch(split, index)

    def check_division(self, devices: int, accumulated: int, slices: int = 1) -> None:
        """Says whether the sequences of a step can be shared out evenly.

        Args:
            devices: How many there are, or groups of them that share sequences.
            accumulated: Batches that each of them takes for one optimiser step.
            slices: Devices of a group.

        Raises:
            ValueError: If they cannot.
        """
        parts = devices * accumulated
        if self.batch_size % parts:
            accumulation = f" with {accumulated} accumulated batches each" if accumulated > 1 else ""
            sharing = f"{devices} device{'s' * (devices > 1)}"
            if slices > 1:
                sharing = f"{devices} group{'s' * (devices > 1)} of {slices} devices"
            nearest = max(1, round(self.batch_size / parts)) * parts
            raise ValueError(
                f"batch_size is {self.batch_size} sequences per step, which cannot be divided among {sharing}"
                f"{accumulation}; {nearest} can."
            )

    def train_dataloader(self) -> DataLoader:
        """Batches of tokens (B, T), targets (B, T) and `scored` (2, T), of all devices' batches of the step together:
        the scored positions among the first t tokens, and the sequences with one."""
        (rank, ranks), accumulated = share(self.trainer), self.trainer.accumulate_grad_batches if self.trainer else 1
        self.check_division(ranks, accumulated)
        stream = BatchStream(TrainingParts(self._detached(), ranks * accumulated), rank, ranks)
        return TrainingLoader(stream, self._consumed, num_workers=self.workers)

    def val_dataloader(self) -> DataLoader:
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> DataLoader:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader:
        """The tokens (B, T) of the test set, without targets."""
        return self._evaluation_loader("test", collate_fn=itemgetter(0))

    def _evaluation_loader(self, split: Split, **options: Any) -> DataLoader:
        rank, ranks = self._place()
        each = -(-self.evaluation_batches(split) // ranks)  # as many for every device, or one would wait forever
        stream = BatchStream(partial(self._detached()._evaluation_batch, split), rank, ranks, stop=each * ranks)
        return DataLoader(stream, batch_size=None, num_workers=self.workers, **options)

    def evaluation_batches(self, split: Split) -> int:
        """The number of batches of an evaluation set; device r of N has batches r, r + N, r + 2 N and so on."""
        return -(-self._sequences(split) // self.evaluation_batch_size)

    def _sequences(self, split: Split) -> int:
        return self.validation_sequences if split == "validation" else self.test_sequences

    def _evaluation_batch(self, split: Split, index: int) -> Batch:
        """Batch `index` of an evaluation set divided as evenly as possible; after the last, one that scores nothing."""
        batches = self.evaluation_batches(split)
        if index >= batches:
            tokens, targets = (part[:1] for part in self._evaluation_batch(split, 0))
            return tokens, torch.full_like(targets, IGNORED)
        first, last = (i * self._sequences(split) // batches for i in (index, index + 1))
        length = self.tokens_at(max(self.validation_lengths if split == "validation" else self.test_lengths))
        blocks = [self._draw(split, block, BLOCK, length) for block in range(first // BLOCK, (last - 1) // BLOCK + 1)]
        skipped = first // BLOCK * BLOCK
        tokens, targets = (torch.cat(parts)[first - skipped : last - skipped] for parts in zip(*blocks, strict=True))
        return tokens, targets

    def _draw(self, split: Split, index: int, sequences: int, length: int) -> Batch:
        entropy = np.random.SeedSequence(self.seed, spawn_key=(get_args(Split).index(split), index))
        return self.generate(np.random.Generator(np.random.SFC64(entropy)), split, sequences, length)

    def _place(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _consumed(self) -> int:
        # `processed` counts a batch once its training step is over: no prefetched one, none that a crash interrupted.
        return 0 if self.trainer is None else self.trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def _detached(self) -> "SequenceTask":
        """A copy that can travel to a worker process: the trainer, with the whole model, stays behind."""
        task = copy.copy(self)
        task.trainer = None
        return task


def share(trainer: Trainer | None) -> tuple[int, int]:
    """Which of the shares of a training batch is this device's, and of how many; devices may have the same."""
    place = None if trainer is None else trainer.distributed_sampler_kwargs
    return (0, 1) if place is None else (place["rank"], place["num_replicas"])


def count_scored(targets: Tensor) -> Tensor:
    """Of the targets (B, T): the scored positions among the first t tokens, and the sequences with one, (2, T)."""
    scored = targets != IGNORED
    return torch.stack([scored.sum(0).cumsum(0), (scored.cumsum(1) > 0).sum(0)])


class TrainingParts:
    """Parts of the training batches: part `index` is the (index mod parts)-th of batch (index div parts).

    Args:
        task: Draws the batches.
        parts: Into how many equal ones each is cut.
    """

    def __init__(self, task: SequenceTask, parts: int) -> None:
        self.task = task
        self.parts = parts
        self.step = -1
        self.drawn: tuple[Tensor, ...] = ()  # tokens and targets of that step's batch, and what is scored in it

    def __call__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        step, part = divmod(index, self.parts)
        if step != self.step:
            tokens, targets = self.task.batch("train", step)
            self.step, self.drawn = step, (tokens, targets, count_scored(targets))
        tokens, targets, scored = self.drawn
        size = self.task.batch_size // self.parts
        rows = slice(part * size, (part + 1) * size)
        return tokens[rows], targets[rows], scored


class BatchStream(IterableDataset):
    """Yields batch(rank), batch(rank + ranks), batch(rank + 2 ranks), ... in the same order for any number of workers.

    Args:
        batch: The batch with a given index.
        rank: Which of the devices this is.
        ranks: How many devices share the batches.
        stop: The index to stop before; None is endless.
    """

    def __init__(
        self, batch: Callable[[int], tuple[Tensor, ...]], rank: int, ranks: int, stop: int | None = None
    ) -> None:
        self.batch = batch
        self.rank = rank
        self.ranks = ranks
        self.stop = stop
        self.start = 0  # batches of this rank to leave out at the beginning

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        # A DataLoader takes from its workers in turn, so each makes every workers-th batch.
        first, step = (self.start + number) * self.ranks + self.rank, self.ranks * workers
        return map(self.batch, itertools.count(first, step) if self.stop is None else range(first, self.stop, step))


class TrainingLoader(DataLoader):
    """Loads the endless training stream; every pass (epoch, or resumed run) begins where training stands.

    Args:
        stream: The training stream.
        consumed: Says how many batches training has consumed so far.
        **options: Options of torch's DataLoader.
    """

    def __init__(self, stream: BatchStream, consumed: Callable[[], int], **options: Any) -> None:
        super().__init__(stream, batch_size=None, **options)
        self.consumed = consumed

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self.dataset.start = self.consumed()
        return super().__iter__()

    # By these two Lightning knows a resumable loader; the trainer's own progress is all the state it needs.
    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        pass
