"""Selective copying: read letters scattered among blanks, then say the letters."""

from typing import Any

import numpy as np

from fprnn_lightning.tasks.base import Split
from fprnn_lightning.tasks.strings import MARKS, SEPARATOR, START, STRING, Span, StringTask


class SelectiveCopying(StringTask):
    """Selective copying: a few letters, at random places of a string of blanks, are said in their order.

    An example with two letters in a string of five tokens::

        tokens      $     *     a     *     *     b     |     a     b
        targets  -100  -100  -100  -100  -100  -100     a     b     .

    What the splits go by are the letters. Published, the answer is given at as many marks, which read alike; here each
    letter is read before the next is to be said, as in copying, so that the answer can be generated.

    Args:
        answer_length: Letters in every string; the published 16 take strings of 4096 tokens.
        shortest: Tokens of the shortest strings in training, blanks included.
        **shared: The options of every task about strings, whose lengths include blanks.

    Raises:
        ValueError: If a string has no room for the letters, an example does not fit into a training sequence, or an
            option is out of range.

    Source: Gu, Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", arXiv 2312.00752.
    """

    name = "selective_copying"
    prompt_overhead = 2

    def __init__(self, answer_length: int = 8, shortest: int = 10, **shared: Any) -> None:
        super().__init__(shortest=shortest, **shared)
        if answer_length < 1:
            raise ValueError(f"answer_length must be at least 1, got {answer_length}.")
        self.answer_length = answer_length
        self._check_lengths(answer_length)

    def answer_lengths(self, lengths: np.ndarray | int) -> np.ndarray:
        return np.full_like(lengths, self.answer_length)

    def examples(
        self, generator: np.random.Generator, split: Split, lengths: np.ndarray
    ) -> tuple[np.ndarray, list[Span], int]:
        letters = self.draw_strings(generator, split, self.answer_lengths(lengths))
        places = np.arange(lengths.max())
        order = np.where(places < lengths[:, None], generator.random((len(lengths), len(places)), np.float32), 1)
        chosen = np.sort(np.argpartition(order, self.answer_length - 1, axis=1)[:, : self.answer_length], axis=1)
        strings = np.full(order.shape, self.alphabet + MARKS - 1, np.int32)
        np.put_along_axis(strings, chosen, letters[:, STRING:], axis=1)
        prompt = [(START, 1), (letters.shape[1], lengths), (SEPARATOR, 1)]
        return np.hstack([letters, strings]), prompt, STRING
