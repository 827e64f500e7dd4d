"""Copying: read a string, then say it again."""

from typing import Any

import numpy as np

from fprnn_lightning.tasks.base import Split
from fprnn_lightning.tasks.strings import SEPARATOR, START, STRING, Span, StringTask


class Copying(StringTask):
    """Copying: a string, then the same string again.

    An example, and after it the beginning of another::

        tokens      $     a     b     c     |     a     b     c     .     $     b
        targets  -100  -100  -100  -100     a     b     c     .  -100  -100  -100

    How tokens are numbered, sequences filled, lengths measured and splits kept apart: see `strings`.

    Args:
        answer_length: How many letters of the string to copy, at most; null for all.
        **shared: The options of every task about strings.

    Raises:
        ValueError: If an example does not fit into a training sequence, or an option is out of range.

    Source: Jelassi et al., "Repeat After Me", ICML 2024, arXiv 2402.01032.
    """

    name = "copying"
    prompt_overhead = 2

    def __init__(self, answer_length: int | None = None, **shared: Any) -> None:
        super().__init__(**shared)
        if answer_length is not None and answer_length < 1:
            raise ValueError(f"answer_length must be at least 1 or null, got {answer_length}.")
        self.answer_length = answer_length
        self._check_lengths(1)

    def answer_lengths(self, lengths: np.ndarray | int) -> np.ndarray:
        return np.minimum(lengths, lengths if self.answer_length is None else self.answer_length)

    def examples(
        self, generator: np.random.Generator, split: Split, lengths: np.ndarray
    ) -> tuple[np.ndarray, list[Span], int]:
        texts = self.draw_strings(generator, split, lengths)
        return texts, [(START, 1), (STRING, lengths), (SEPARATOR, 1)], STRING


class DuplicateCopying(StringTask):
    """Copying of strings in which an n-gram occurs more than once, so that it does not tell how to go on.

    An example, with ab twice::

        tokens      $     a     b     c     a     b     |     a     b     c     a     b
        targets  -100  -100  -100  -100  -100  -100     a     b     c     a     b     .

    The two do not overlap, and the later begins after the first k letters, which are what the splits go by. The
    published models are trained by copying and only tested on duplicates: give `test` a checkpoint of Copying.

    Args:
        ngram: n, letters that occur twice.
        **shared: The options of every task about strings.

    Raises:
        ValueError: If a string is too short for the duplicate, an example does not fit into a training sequence, or
            an option is out of range.

    Source: Jelassi et al., "Repeat After Me", ICML 2024, arXiv 2402.01032.
    """

    name = "duplicate_copying"
    prompt_overhead = 2

    def __init__(self, ngram: int = 3, shortest: int = 8, **shared: Any) -> None:
        super().__init__(shortest=shortest, **shared)
        if ngram < 1:
            raise ValueError(f"ngram must be at least 1, got {ngram}.")
        self.ngram = ngram
        self.later = max(ngram, self.prefix_length)  # where the later of the two begins, at the earliest
        self._check_lengths(self.later + ngram)

    def answer_lengths(self, lengths: np.ndarray | int) -> np.ndarray | int:
        return lengths

    def examples(
        self, generator: np.random.Generator, split: Split, lengths: np.ndarray
    ) -> tuple[np.ndarray, list[Span], int]:
        texts = self.draw_strings(generator, split, lengths)
        later = generator.integers(self.later, lengths - self.ngram, endpoint=True)
        earlier = generator.integers(0, later - self.ngram, endpoint=True)
        to, source = (STRING + place[:, None] + np.arange(self.ngram) for place in (later, earlier))
        np.put_along_axis(texts, to, np.take_along_axis(texts, source, axis=1), axis=1)
        return texts, [(START, 1), (STRING, lengths), (SEPARATOR, 1)], STRING
