"""Look-up: find an n-gram in a string, say the letters that follow it there."""

from typing import Any

import numpy as np

from fprnn_lightning.tasks.base import Split
from fprnn_lightning.tasks.strings import SEPARATOR, START, STRING, Span, StringTask


class Lookup(StringTask):
    """Looks up an n-gram that occurs at one place of the string, all such strings and places being equally likely.

    Args:
        ngram: n, letters of what to look up.
        answer_length: Letters to say.
        **shared: The options of every task about strings.

    Raises:
        ValueError: If a string is too short for n-gram and answer, the alphabet too small for n-grams that occur once,
            an example does not fit into a training sequence, or an option is out of range.
    """

    def __init__(self, ngram: int = 3, answer_length: int = 2, **shared: Any) -> None:
        super().__init__(**shared)
        for option, value in (("ngram", ngram), ("answer_length", answer_length)):
            if value < 1:
                raise ValueError(f"{option} must be at least 1, got {value}.")
        self.ngram = ngram
        self.answer_length = answer_length
        self._check_lengths(ngram + answer_length)
        longest = max(self.longest, self.validation_lengths[-1], self.test_lengths[-1])
        if self.alphabet**ngram < longest:
            raise ValueError(
                f"alphabet={self.alphabet} is too small for an n-gram of ngram={ngram} letters to occur only once in a "
                f"string of {longest}: alphabet to the power of ngram must be at least {longest}."
            )

    def answer_lengths(self, lengths: np.ndarray | int) -> np.ndarray:
        return np.full_like(lengths, self.answer_length)

    def draw_places(
        self, generator: np.random.Generator, split: Split, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws texts (M, W), as of `draw_strings`, and the columns (M,) at which the n-grams to look up begin."""
        texts = np.empty((len(lengths), STRING + lengths.max()), np.int32)
        places = np.empty_like(lengths)
        waiting = np.arange(len(lengths))
        while len(waiting):
            drawn = self.draw_strings(generator, split, lengths[waiting])
            letters, last = drawn[:, STRING:], lengths[waiting] - self.ngram
            place = generator.integers(last - self.answer_length, endpoint=True)
            starts = letters.shape[1] - self.ngram + 1
            same = np.arange(starts) <= last[:, None]
            for i in range(self.ngram):
                same &= letters[:, i : i + starts] == np.take_along_axis(letters, place[:, None] + i, axis=1)
            once = same.sum(1) == 1
            texts[waiting[once], : drawn.shape[1]] = drawn[once]
            places[waiting[once]] = STRING + place[once]
            waiting = waiting[~once]
        return texts, places


class PrefixLookup(Lookup):
    """Looks up an n-gram given before the string, says the letters that follow it there.

    An example, where bc is to be looked up for one letter::

        tokens      $     b     c     |     a     b     c     d     a     |     d
        targets  -100  -100  -100  -100  -100  -100  -100  -100  -100     d     .

    Source: the prefix key variant of n-gram look-up of Jelassi et al., "Repeat After Me", ICML 2024, arXiv 2402.01032.
    """

    name = "prefix_lookup"

    @property
    def prompt_overhead(self) -> int:
        return self.ngram + 3

    def examples(
        self, generator: np.random.Generator, split: Split, lengths: np.ndarray
    ) -> tuple[np.ndarray, list[Span], np.ndarray]:
        texts, places = self.draw_places(generator, split, lengths)
        prompt = [(START, 1), (places, self.ngram), (SEPARATOR, 1), (STRING, lengths), (SEPARATOR, 1)]
        return texts, prompt, places + self.ngram


class SuffixLookup(Lookup):
    """Looks up an n-gram given after the string, says the letters that follow it there.

    An example, where bc is to be looked up for one letter::

        tokens      $     a     b     c     d     a     |     b     c     d
        targets  -100  -100  -100  -100  -100  -100  -100  -100     d     .

    Source: the suffix key variant of n-gram look-up of Jelassi et al., "Repeat After Me", ICML 2024, arXiv 2402.01032.
    """

    name = "suffix_lookup"

    @property
    def prompt_overhead(self) -> int:
        return self.ngram + 2

    def examples(
        self, generator: np.random.Generator, split: Split, lengths: np.ndarray
    ) -> tuple[np.ndarray, list[Span], np.ndarray]:
        texts, places = self.draw_places(generator, split, lengths)
        prompt = [(START, 1), (STRING, lengths), (SEPARATOR, 1), (places, self.ngram)]
        return texts, prompt, places + self.ngram
