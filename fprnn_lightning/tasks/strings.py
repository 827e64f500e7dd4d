"""Strings of random letters with a question about them, written as one example after another in a training sequence.

An example is a prompt, the answer to it and an end mark: copying, say, is $ string | string . With n letters, tokens 0
to n - 1 are the letters, n is $ (start), n + 1 is | (separator), n + 2 is . (end), n + 3 is * (blank, padding).

Source: Jelassi, Brandfonbrener, Kakade, Malach, "Repeat After Me: Transformers are Better than State Space Models at
    Copying", ICML 2024, arXiv 2402.01032, and its public code.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fprnn_lightning.tasks.base import SequenceTask, Split
from fprnn_lightning.tasks.splits import SPLIT_SPACE, draw_owned

MARKS = 4
START, SEPARATOR, END, STRING = range(4)  # columns of a text: three marks, then letters

Span = tuple[int | np.ndarray, int | np.ndarray]  # of each text: first column, number of columns


class StringTask(SequenceTask):
    """Strings with a question about them; `examples` says what the prompt is and where the answer stands.

    A training sequence is filled with examples, strings being of uniform length from `shortest` to `longest`; the last
    is cut where the sequence ends, and not scored. Of the others the answer is scored, and the end mark that follows.

    An evaluation sequence is one example, padded with *; the lengths to measure at take turns. Every length is measured
    on its own strings, and only the answer's letters are scored: given what precedes them (token_accuracy and so on),
    and as the model goes on by itself from the prompt (generated_token_accuracy, generated_sequence_accuracy).

    The splits are disjoint: a hash of the first k letters of a string says which it belongs to, `prefix_length` k being
    the smallest number for which there are at least 2^20 of them (5 of 26 letters). There are too few strings shorter
    than that to keep apart.

    Args:
        alphabet: Number of letters.
        shortest: Letters of the shortest strings in training.
        longest: Letters of the longest strings in training.
        train_length: Tokens of a training sequence, whatever examples they are.
        validation_lengths: Lengths of strings at which validation measures.
        test_lengths: The same for test; 50 is added.
        validation_sequences: Strings in the validation set, all lengths together.
        test_sequences: The same for test.
        evaluation_batch_size: Validation and test sequences per batch, at most: many, as answers are
            generated token by token, those to prompts of one length together.
        **shared: The options of every task.
    """

    prefix_closed = False

    def __init__(
        self,
        alphabet: int = 26,
        shortest: int = 5,
        longest: int = 50,
        train_length: int = 256,
        validation_lengths: Sequence[int] = (25, 50),
        test_lengths: Sequence[int] = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100),
        validation_sequences: int = 2048,
        test_sequences: int = 10_240,
        evaluation_batch_size: int = 1024,
        **shared: Any,
    ) -> None:
        super().__init__(
            train_length=train_length,
            validation_lengths=validation_lengths,
            test_lengths=test_lengths,
            validation_sequences=validation_sequences,
            test_sequences=test_sequences,
            evaluation_batch_size=evaluation_batch_size,
            **shared,
        )
        if alphabet < 2:
            raise ValueError(f"alphabet must be at least 2 letters, got {alphabet}.")
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest must be from 1 to longest={longest}, got {shortest}.")
        self.alphabet = alphabet
        self.shortest = shortest
        self.longest = longest
        self.prefix_length = next(k for k in range(1, 21) if alphabet**k >= SPLIT_SPACE)

    @property
    @abstractmethod
    def prompt_overhead(self) -> int:
        """Tokens of a prompt besides its string."""

    @abstractmethod
    def answer_lengths(self, lengths: np.ndarray | int) -> np.ndarray:
        """Letters of the answer about strings of the given lengths."""

    @abstractmethod
    def examples(
        self, generator: np.random.Generator, split: Split, lengths: np.ndarray
    ) -> tuple[np.ndarray, list[Span], int | np.ndarray]:
        """Draws examples with strings of the given lengths (M,).

        Returns:
            A text for each (M, W), as of `draw_strings`; the spans of it that make the prompt, in their order; the
            column at which the answer begins.
        """

    @property
    def vocab_size(self) -> int:
        return self.alphabet + MARKS

    @property
    def chance(self) -> float:
        return 1 / self.alphabet

    @property
    def trained_length(self) -> int:
        return self.longest

    def tokens_at(self, length: int) -> int:
        return int(self._example_tokens(length)) - 2  # the last letter and the end mark are not read

    def draw_strings(self, generator: np.random.Generator, split: Split, lengths: np.ndarray) -> np.ndarray:
        """Draws strings of a split, of the given lengths (M,).

        Returns:
            (M, 3 + the longest) int32: $ | . in the columns START, SEPARATOR, END, letters from the column STRING on;
            those beyond a string's length mean nothing.
        """

        def draw(*size: int) -> np.ndarray:
            return generator.integers(self.alphabet, size=size, dtype=np.int32)

        k, strings = self.prefix_length, len(lengths)
        prefixes = draw_owned(lambda number: draw(k, number), split, strings, self.alphabet).T
        marks = np.full((strings, STRING), self.alphabet + np.arange(STRING, dtype=np.int32))
        letters = draw(strings, max(lengths.max() - k, 0))
        return np.hstack([marks, prefixes, letters])[:, : STRING + lengths.max()]

    def generate(
        self, generator: np.random.Generator, split: Split, sequences: int, length: int
    ) -> tuple[Tensor, Tensor]:
        room = length + 1  # what is said at a position is the token that is read at the next
        if split == "train":
            most = -(-room // self._example_tokens(self.shortest))
            lengths = generator.integers(self.shortest, self.longest + 1, size=(sequences, most))
        else:
            measured = self.validation_lengths if split == "validation" else self.test_lengths
            lengths = np.resize(np.roll(measured, generator.integers(len(measured))), (sequences, 1))
        sizes = self._example_tokens(lengths)
        ends = sizes.cumsum(1)
        inside = np.arange(room) < ends[:, -1:]
        used = ends - sizes < room
        lengths, left = lengths[used], (room - ends + sizes)[used]  # M examples, and the tokens that each has room for
        texts, prompt, answer = self.examples(generator, split, lengths)

        spans = [*prompt, (answer, self.answer_lengths(lengths)), (END, 1)]
        firsts, counts = np.stack([np.broadcast_arrays(*span, lengths)[:2] for span in spans], axis=2)  # M S each
        scored = np.zeros(counts.shape, bool)
        if split == "train":
            scored[:, -2:] = (sizes[used] <= left)[:, None]
        else:
            scored[:, -2] = True
        counts = np.diff(np.minimum(counts.cumsum(1), left[:, None]), prepend=0)  # cut where the sequence ends

        tokens = np.full(inside.shape, self.alphabet + MARKS - 1)
        targets = np.full(inside.shape, -100)
        tokens[inside] = join_spans(texts, firsts, counts)
        targets[inside] = np.where(scored.ravel().repeat(counts.ravel()), tokens[inside], -100)
        return tuple(torch.from_numpy(part).contiguous() for part in (tokens[:, :-1], targets[:, 1:]))

    def _example_tokens(self, lengths: np.ndarray | int) -> np.ndarray | int:
        return lengths + self.prompt_overhead + self.answer_lengths(lengths) + 1

    def _check_lengths(self, least: int) -> None:
        """Raises ValueError if a string is shorter than `least` or an example does not fit into a training sequence."""
        measured = {"validation_lengths": self.validation_lengths[0], "test_lengths": self.test_lengths[0]}
        for option, length in {"shortest": self.shortest, **measured}.items():
            if length < least:
                raise ValueError(f"{option} must be at least {least} for this task and its options, got {length}.")
        tokens = int(self._example_tokens(self.longest)) - 1
        if self.train_length < tokens:
            raise ValueError(
                f"train_length must be at least {tokens} tokens to hold an example of longest={self.longest}, "
                f"got {self.train_length}."
            )


def join_spans(texts: np.ndarray, firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Joins spans of texts: counts[m, s] columns of text m from firsts[m, s] on, span after span, text after text.

    Args:
        texts: (M, W).
        firsts: (M, S).
        counts: (M, S).

    Returns:
        (sum of counts,).
    """
    places = (firsts + texts.shape[1] * np.arange(len(texts))[:, None]).ravel()  # in all texts, one after another
    counts = counts.ravel()
    return texts.ravel()[np.arange(counts.sum()) + (places - counts.cumsum() + counts).repeat(counts)]
