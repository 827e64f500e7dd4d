"""Multi-query associative recall (MQAR): read pairs of a key and a value, then say the value of every key asked for.

A key is asked for in slot s = 1, 2, ... of those behind the pairs with a probability proportional to s^(power - 1).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fprnn_lightning.tasks.base import SequenceTask, Split
from fprnn_lightning.tasks.splits import SPLIT_SPACE, draw_owned


class AssociativeRecall(SequenceTask):
    """Multi-query associative recall (MQAR): pairs of a key and a value first, then every key again, for its value.

    An example row of 2 pairs, with 12 tokens of vocabulary and filler of zeros::

        tokens      2     8     4     7     0     4     0     0     0     2
        targets  -100  -100  -100  -100  -100     7  -100  -100  -100     8

    Keys are 1 to V/2 - 1, values V/2 to V - 1, all of a row different. What follows the pairs are slots of two tokens,
    filler and a query (or more filler). Each key takes a slot of its own, drawn by the power law one after another;
    the farthest query is then moved into the last slot, so that a row is as long as it is said to be, which is the
    one deviation from the published generator.

    A row fills its length. Accuracy at a shorter length is over the queries up to there: the nearest ones. Where there
    are none yet, as within the pairs, it is nan.

    With several numbers of pairs, as the published training mix has, each row of a batch has one of them, all being
    equally likely; so it is in evaluation.

    The splits are disjoint: a hash of the pairs says which a row belongs to.

    Args:
        pairs: Of a key and a value: how many, or a list of numbers of which each row has one.
        vocabulary: V, number of tokens; more than a thousand tell models apart, according to the paper.
        power: At 1 every slot is as likely as any other; the lower, the nearer to the pairs the queries are.
        random_filler: Fill with any token of the vocabulary; else with 0.
        train_length: Tokens of a training sequence; all lengths must have room for 4 tokens a pair.
        validation_lengths: Lengths, in tokens, at which validation measures; all are prefixes of the longest.
        test_lengths: The same for test; 50 is added.
        evaluation_batch_size: Validation and test sequences per batch, at most: few, as every token has V
            logits.
        **shared: The options of every task.

    Raises:
        ValueError: If the longest sequences of a split have no room for the queries, there are too few keys and values
            to keep the splits apart, or a shared option is out of range.

    Source: Arora, Eyuboglu et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", ICLR 2024,
        arXiv 2312.04927.
    """

    prefix_closed = False
    name = "associative_recall"

    def __init__(
        self,
        pairs: list[int] | int = 8,
        vocabulary: int = 8192,
        power: float = 0.01,
        random_filler: bool = True,
        train_length: int = 64,
        validation_lengths: Sequence[int] = (64, 128),
        test_lengths: Sequence[int] = (64, 128, 256, 512),
        evaluation_batch_size: int = 16,
        **shared: Any,
    ) -> None:
        super().__init__(
            train_length=train_length,
            validation_lengths=validation_lengths,
            test_lengths=test_lengths,
            evaluation_batch_size=evaluation_batch_size,
            **shared,
        )
        self.pairs = [pairs] if isinstance(pairs, int) else pairs
        if min(self.pairs, default=0) < 1:
            raise ValueError(f"pairs must be at least 1, got {pairs}.")
        most = max(self.pairs)
        longest = {"train_length": train_length, "validation_lengths": self.validation_lengths[-1]}
        for option, length in {**longest, "test_lengths": self.test_lengths[-1]}.items():
            if length < 4 * most:
                raise ValueError(f"{option} must reach {4 * most} tokens to ask for {most} pairs, got {length}.")
        self.keys = range(1, vocabulary // 2)
        self.values = range(max(vocabulary // 2, 1), vocabulary)
        for number in self.pairs:
            if math.perm(len(self.keys), number) * math.perm(len(self.values), number) < SPLIT_SPACE:
                raise ValueError(
                    f"vocabulary must be larger for {number} pairs in {SPLIT_SPACE:,} different ways, got {vocabulary}."
                )
        if not 0 <= power <= 1:
            raise ValueError(f"power must be from 0 to 1, got {power:g}.")
        self.vocabulary = vocabulary
        self.power = power
        self.random_filler = random_filler

    @property
    def vocab_size(self) -> int:
        return self.vocabulary

    def generate(
        self, generator: np.random.Generator, split: Split, sequences: int, length: int
    ) -> tuple[Tensor, Tensor]:
        tokens, targets = np.empty((2, sequences, length), np.int64)
        chosen = generator.integers(len(self.pairs), size=sequences)
        for index in np.unique(chosen):
            rows = np.flatnonzero(chosen == index)
            tokens[rows], targets[rows] = self._draw_rows(generator, split, self.pairs[index], len(rows), length)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def _draw_rows(
        self, generator: np.random.Generator, split: Split, number: int, sequences: int, length: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows with this number of pairs: tokens and targets, (B, T)."""

        def draw(sequences: int) -> np.ndarray:
            drawn = (draw_distinct(generator, part, number, sequences) for part in (self.keys, self.values))
            return np.stack(list(drawn), axis=1).reshape(2 * number, sequences)

        pairs = draw_owned(draw, split, sequences, self.vocabulary | 1).T
        keys, values = pairs[:, 0::2], pairs[:, 1::2]
        queries = length - 1 - 2 * self._slots_from_end(generator, number, sequences, (length - 2 * number) // 2)
        if self.random_filler:
            tokens = generator.integers(self.vocabulary, size=(sequences, length))
        else:
            tokens = np.zeros((sequences, length), np.int64)
        targets = np.full((sequences, length), -100)
        tokens[:, : 2 * number] = pairs
        np.put_along_axis(tokens, queries, keys, axis=1)
        np.put_along_axis(targets, queries, values, axis=1)
        return tokens, targets

    def _slots_from_end(self, generator: np.random.Generator, pairs: int, sequences: int, slots: int) -> np.ndarray:
        """The slot of each key, 0 being the last: (B, pairs), all of a row different.

        Exponential waiting times with rates proportional to the probabilities: the first slots to come are those that
        would be drawn one after another without replacement.
        """
        rates = np.arange(1, slots + 1, dtype=np.float32) ** (self.power - 1)
        waits = generator.standard_exponential((sequences, slots), np.float32) / rates
        chosen = np.argpartition(waits, pairs - 1, axis=1)[:, :pairs]
        order = np.take_along_axis(waits, chosen, axis=1).argsort(axis=1)
        chosen = np.take_along_axis(chosen, order, axis=1)
        np.put_along_axis(chosen, chosen.argmax(axis=1, keepdims=True), slots - 1, axis=1)
        return slots - 1 - chosen


def draw_distinct(generator: np.random.Generator, choices: range, count: int, sequences: int) -> np.ndarray:
    """Draws distinct numbers in random order for each of several sequences.

    Returns:
        (count, sequences).

    Source: Floyd's algorithm (Bentley, "Programming Pearls: A Sample of Brilliance", CACM 1987).
    """
    drawn = np.empty((count, sequences), np.int32)
    for i in range(count):
        newest = choices[len(choices) - count + i]
        number = generator.integers(choices.start, newest + 1, size=sequences, dtype=np.int32)
        drawn[i] = np.where((drawn[:i] == number).any(0), newest, number)
    return generator.permuted(drawn, axis=0)  # every set is as likely as any other, but not every order
