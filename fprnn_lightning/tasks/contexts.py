"""Contexts cut out of a text that exists, at one of n places: a random one in training, all in turn in evaluation.

Context i of an evaluation set is at place i s mod n. The stride s is near n / φ, has no common factor with n, and the
continued fraction of n / s no large partial quotient: any number of contexts is spread evenly, and n contexts reach
every place.

Source: Niederreiter, "Random Number Generation and Quasi-Monte Carlo Methods", 1992, chapter 3, on such sequences.
"""

from abc import abstractmethod
from functools import lru_cache
from math import gcd

import numpy as np

from fprnn_lightning.tasks.base import Batch, SequenceTask, Split

GOLDEN = (1 + 5**0.5) / 2


class ContextTask(SequenceTask):
    """Sequences that are stretches of what a split holds. The evaluation sets are the same whatever the seed."""

    @abstractmethod
    def places(self, split: Split) -> int:
        """How many places for a context a split has."""

    @abstractmethod
    def contexts(self, split: Split, places: np.ndarray, length: int) -> Batch:
        """The contexts of T tokens at some places (B,) of a split: tokens and targets (B, T)."""

    def generate(self, generator: np.random.Generator, split: Split, sequences: int, length: int) -> Batch:
        return self.contexts(split, generator.integers(self.places(split), size=sequences), length)

    def _draw(self, split: Split, index: int, sequences: int, length: int) -> Batch:
        if split == "train":
            return super()._draw(split, index, sequences, length)
        indices = np.arange(index * sequences, (index + 1) * sequences)
        return self.contexts(split, spread(indices, self.places(split)), length)


def spread(indices: np.ndarray, places: int) -> np.ndarray:
    """The place of each index: those of 0, 1, ..., m - 1, any m, are spread evenly over the places."""
    return indices * stride(places) % places


@lru_cache
def stride(places: int) -> int:
    """The step from one place to the next."""
    near = round(places / GOLDEN)
    coprime = (step for step in range(max(near - 50, 1), near + 51) if gcd(step, places) == 1)
    return min(coprime, key=lambda step: largest_quotient(places, step))


def largest_quotient(a: int, b: int) -> int:
    """The largest partial quotient of the continued fraction of a / b."""
    return max(a // b, largest_quotient(b, a % b)) if b else 0
