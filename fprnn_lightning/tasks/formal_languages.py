"""Formal languages: strings with an answer that a small machine reads off, an automaton (parity, even pairs, cycle
navigation, modular arithmetic) or, for modular arithmetic with brackets, a stack.

Every prefix of a string of the first four is a string too, so every position is labelled, and one pass over the longest
strings measures every length; to learn the answer to the whole string only, as published, give --model.labels last. A
bracketed expression has no value before its end: there, one label a sequence.

The published range of lengths is 3 to 40 tokens for training and 40 to 256 for test.

Source: the languages are those of Delétang et al., "Neural Networks and the Chomsky Hierarchy", ICLR 2023, arXiv
2207.02098; the tokens of modular arithmetic those of "Fixed-Point RNNs", arXiv 2503.10799, after "xLSTM", arXiv
2405.04517.
"""

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate, cycle
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fprnn_lightning.tasks.base import SequenceTask, Split
from fprnn_lightning.tasks.splits import BUCKETS, OWNED, OWNERS, SPLIT_SPACE, draw_owned, owner_of

MODULUS = 5
PLUS, MINUS, TIMES, OPEN, CLOSE, EQUALS, PADDING = range(MODULUS, MODULUS + 7)  # the digits are 0 to 4
ARITHMETIC_TOKENS = MODULUS + 7

SHORTEST = 3  # tokens of a sequence of bracketed arithmetic
SEPARATE = 17  # from so many tokens on, there are enough of them (1.7 million of 17) to keep splits apart
HASH_BASE = ARITHMETIC_TOKENS + 1  # odd


class FormalLanguage(SequenceTask):
    """Strings of a formal language with its answers; `classes` says how many answers there are.

    Args:
        train_length: Tokens of a training sequence.
        validation_lengths: Lengths, in tokens, at which validation measures.
        test_lengths: The same for test; 50 is added.
        **shared: The options of every task.
    """

    def __init__(
        self,
        train_length: int = 40,
        validation_lengths: Sequence[int] = (16, 40),
        test_lengths: Sequence[int] = (40, 64, 96, 128, 160, 192, 224, 256),
        **shared: Any,
    ) -> None:
        super().__init__(
            train_length=train_length, validation_lengths=validation_lengths, test_lengths=test_lengths, **shared
        )

    @property
    @abstractmethod
    def classes(self) -> int:
        """The number of answers: labels are below it."""

    @property
    def chance(self) -> float:
        return 1 / self.classes


class RegularLanguage(FormalLanguage):
    """A language in which position t may hold any token of `alphabets[t % len(alphabets)]`, all equally likely.

    The splits are disjoint as those of word problems are: a hash of the first k tokens, `prefix_length`, says which
    split a sequence belongs to, k being the smallest number for which there are at least 2^20 prefixes. Sequences
    shorter than that are too few to keep apart.
    """

    alphabets: tuple[range, ...]

    @abstractmethod
    def answers(self, tokens: np.ndarray) -> np.ndarray:
        """The answer to the string up to each position: tokens (T, B) -> (T, B), both int8."""

    @property
    def prefix_length(self) -> int:
        """Tokens that say which split a sequence belongs to."""
        prefixes = accumulate(map(len, cycle(self.alphabets)), mul)
        return next(k for k, number in enumerate(prefixes, 1) if number >= SPLIT_SPACE)

    def generate(
        self, generator: np.random.Generator, split: Split, sequences: int, length: int
    ) -> tuple[Tensor, Tensor]:
        def draw(first: int, last: int, number: int) -> np.ndarray:
            alphabets = (self.alphabets[t % len(self.alphabets)] for t in range(first, last))
            steps = [generator.integers(a.start, a.stop, size=number, dtype=np.int8) for a in alphabets]
            return np.array(steps, np.int8).reshape(-1, number)  # T B: one time step is contiguous

        k = self.prefix_length
        prefixes = draw_owned(lambda number: draw(0, k, number), split, sequences, self.vocab_size)
        tokens = np.concatenate([prefixes, draw(k, length, sequences)])[:length]
        return tuple(torch.from_numpy(array).T.contiguous().long() for array in (tokens, self.answers(tokens)))


class Parity(RegularLanguage):
    """Whether the number of ones so far is odd.

    An example row::

        tokens   1  0  1  1  0
        targets  1  1  0  1  1
    """

    alphabets = (range(2),)
    name = "parity"
    vocab_size = 2
    classes = 2

    def answers(self, tokens: np.ndarray) -> np.ndarray:
        return np.bitwise_xor.accumulate(tokens)


class EvenPairs(RegularLanguage):
    """Whether the number of unequal neighbours, 01 and 10, is odd so far: whether the last bit differs from the first.

    An example row::

        tokens   1  0  0  1  0
        targets  0  1  1  0  1
    """

    alphabets = (range(2),)
    name = "even_pairs"
    vocab_size = 2
    classes = 2

    def answers(self, tokens: np.ndarray) -> np.ndarray:
        return tokens ^ tokens[0]


class CycleNavigation(RegularLanguage):
    """Where on a circle of five places a walk has come to that begins at 0: 0 is a step back, 1 stay, 2 a step forward.

    An example row::

        tokens   2  2  1  0  0  0
        targets  1  2  2  1  0  4
    """

    alphabets = (range(3),)
    name = "cycle_navigation"
    vocab_size = 5
    classes = 5

    def answers(self, tokens: np.ndarray) -> np.ndarray:
        return (np.cumsum(tokens - 1, axis=0) % 5).astype(np.int8)


class ModularArithmetic(RegularLanguage):
    """The value mod 5 of digits joined by + - ×, × binding closer.

    An example row::

        tokens   3  +  2  ×  4  -  1
        targets  3  3  0  0  1  1  0

    An operator is labelled with the value of the expression before it: an even length stands for the expression one
    token shorter, as in the published generator. Tokens are 0 to 4 for the digits, 5 to 7 for + - ×; the vocabulary of
    12 is that of modular arithmetic with brackets.
    """

    alphabets = (range(MODULUS), range(PLUS, TIMES + 1))
    name = "modular_arithmetic"
    vocab_size = ARITHMETIC_TOKENS
    classes = MODULUS

    def answers(self, tokens: np.ndarray) -> np.ndarray:
        values = np.empty_like(tokens)
        total, term = np.zeros_like(tokens[0]), tokens[0]  # the value is total + term, and × goes on with the term
        values[:2] = term
        for t in range(2, len(tokens), 2):
            operator, digit = tokens[t - 1], tokens[t]
            times = operator == TIMES
            total = np.where(times, total, values[t - 1])
            term = np.where(times, term, 1 - 2 * (operator == MINUS)) * digit % MODULUS
            values[t : t + 2] = (total + term) % MODULUS
        return values


class ModularArithmeticWithBrackets(FormalLanguage):
    """The value mod 5 of a fully bracketed expression of digits, + - × and negative digits, said at its =.

    An example row, padded on the right (_)::

        tokens      (     3     ×     (     -     2     )     )     =     _     _
        targets  -100  -100  -100  -100  -100  -100  -100  -100     4  -100  -100

    A sequence has its = at the end, and is padded to the longest. In training its length is uniform from 3 to
    `train_length`; in evaluation the lengths to measure at take turns. A sequence counts at its own length only.

    Expressions are drawn as published: one of m ≥ 5 tokens is (left operator right), the length of left uniform from 1
    to m - 4; shorter ones are d, -d, (d) and (-d). Tokens are 0 to 4 for the digits, then + - × ( ) = and padding.
    As a product with 0 is 0, so are 28 % of the values in training and 32 % in test: to say 0 is better than `chance`,
    which is 1/5, as published.

    The splits are disjoint: a hash of the whole sequence says which it belongs to, if it has at least 17 tokens.
    Shorter ones are too few to keep apart.

    Raises:
        ValueError: If a length is below 3, or a shared option is out of range.
    """

    prefix_closed = False
    name = "modular_arithmetic_with_brackets"
    vocab_size = ARITHMETIC_TOKENS
    classes = MODULUS

    def __init__(self, **shared: Any) -> None:
        super().__init__(**shared)
        shortest = min(self.train_length, *self.validation_lengths, *self.test_lengths)
        if shortest < SHORTEST:
            raise ValueError(f"Lengths of bracketed arithmetic must be at least {SHORTEST} tokens, got {shortest}.")

    def generate(
        self, generator: np.random.Generator, split: Split, sequences: int, length: int
    ) -> tuple[Tensor, Tensor]:
        if split == "train":
            lengths = generator.integers(SHORTEST, length + 1, size=sequences)
        else:
            measured = self.validation_lengths if split == "validation" else self.test_lengths
            lengths = np.resize(np.roll(measured, generator.integers(len(measured))), sequences)
        tokens = np.empty((sequences, length), np.int8)
        values = np.empty(sequences, np.int8)
        owner = OWNERS.index(split)
        candidates = BUCKETS // OWNED[owner]  # drawn for each sequence at once: one is to be expected of the split
        waiting = np.arange(sequences)
        while len(waiting):
            drawn_lengths = lengths[waiting].repeat(candidates)
            drawn, drawn_values = _draw_expressions(generator, drawn_lengths, length)
            fits = (owner_of(drawn.T, HASH_BASE) == owner) | (drawn_lengths < SEPARATE)
            fits = fits.reshape(len(waiting), candidates)
            done = fits.any(1)
            chosen = np.arange(0, len(drawn), candidates)[done] + fits.argmax(1)[done]
            tokens[waiting[done]], values[waiting[done]] = drawn[chosen], drawn_values[chosen]
            waiting = waiting[~done]
        targets = np.full((sequences, length), -100)
        targets[np.arange(sequences), lengths - 1] = values
        return torch.from_numpy(tokens).long(), torch.from_numpy(targets)


def _draw_expressions(generator: np.random.Generator, lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Expressions with = at the end, padded: their lengths (B,) -> tokens (B, width), values (B,)."""
    tokens = np.full((len(lengths), width), PADDING, np.int8)
    starts = np.arange(0, tokens.size, width)
    text = tokens.reshape(-1)
    text[starts + lengths - 1] = EQUALS
    return tokens, _write(generator, text, starts, lengths - 1)


def _write(generator: np.random.Generator, text: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Draws all expressions of one depth of nesting, then those within them; returns their values."""
    values = np.empty(len(starts), np.int8)

    leaves = np.flatnonzero(lengths < 5)  # d, -d, (d), (-d)
    start, length = starts[leaves], lengths[leaves]
    digits = generator.integers(MODULUS, size=len(leaves), dtype=np.int8)
    bracketed, negative = np.flatnonzero(length > 2), np.flatnonzero(length % 2 == 0)
    text[start[bracketed]] = OPEN
    text[(start + length - 1)[bracketed]] = CLOSE
    text[start + length // 2] = digits
    text[(start + length // 2 - 1)[negative]] = MINUS
    digits[negative] = -digits[negative] % MODULUS
    values[leaves] = digits

    inner = np.flatnonzero(lengths >= 5)  # (left operator right)
    if len(inner):
        start, length = starts[inner], lengths[inner]
        left = (generator.random(len(inner), dtype=np.float32) * (length - 4)).astype(np.int64) + 1  # 1 to length - 4
        operators = generator.integers(PLUS, TIMES + 1, size=len(inner), dtype=np.int8)
        text[start] = OPEN
        text[start + 1 + left] = operators
        text[start + length - 1] = CLOSE
        within = np.concatenate([start + 1, start + 2 + left]), np.concatenate([left, length - 3 - left])
        a, b = np.split(_write(generator, text, *within), 2)
        values[inner] = np.choose(operators - PLUS, (a + b, a - b, a * b)) % MODULUS
    return values
