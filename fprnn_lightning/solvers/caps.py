"""How many iterations a solve may take, where that is not one number: as many as there are tokens, or a random number.

A random cap is a function of its seed and of the number of the draw alone, so it is the same on every rank and in every
layer. `Draws` counts, and is part of a checkpoint, so a resumed run draws on. Accumulated batches share one.

Source: Fixed-Point RNNs (arXiv 2503.10799), figure 6: l_max ~ Gamma(4) with mean 4, drawn for every batch.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn


class IterationCap(ABC):
    """The most iterations of a solve; subclasses are frozen dataclasses without weights."""

    is_random: ClassVar[bool] = False

    @abstractmethod
    def iterations(self, time: int, draw: int) -> int:
        """The cap on sequences of `time` tokens, in the draw-th batch."""

    def typical(self, time: int) -> float:
        """The cap on sequences of `time` tokens, or about its mean where it is drawn."""
        return float(self.iterations(time, 0))


@dataclass(frozen=True)
class SequenceLength(IterationCap):
    """As many iterations as there are tokens.

    Args:
        least: iterations of sequences shorter than that, as `step` has one token only, which takes iterations too.

    Raises:
        ValueError: if least is less than 1.
    """

    least: int = 16

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ValueError(f"SequenceLength: least is {self.least}, must be at least 1")

    def iterations(self, time: int, draw: int) -> int:
        return max(time, self.least)


@dataclass(frozen=True)
class RandomCap(IterationCap):
    """A number drawn for every training batch from a gamma distribution, rounded, at least 1: the paper's cheap mode.

    Args:
        mean: of the distribution.
        shape: of the distribution; its standard deviation is mean / sqrt(shape).
        seed: of the draws.

    Raises:
        ValueError: if mean or shape is not positive, or seed negative.
    """

    is_random: ClassVar[bool] = True

    mean: float = 4.0
    shape: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.mean > 0 and self.shape > 0):
            raise ValueError(f"RandomCap: mean {self.mean:g} and shape {self.shape:g} must be above 0")
        if self.seed < 0:
            raise ValueError(f"RandomCap: seed is {self.seed}, must not be negative")

    def typical(self, time: int) -> float:
        return self.mean

    def iterations(self, time: int, draw: int) -> int:
        drawn = np.random.default_rng((self.seed, draw)).gamma(self.shape, self.mean / self.shape)
        return max(1, round(drawn))


class Draws(nn.Module):
    """Counts draws, on the host; its count is the one thing it adds to a state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def next(self) -> int:
        """The number of this draw, from 0."""
        self.count += 1
        return self.count - 1

    def again(self) -> None:
        """Has the next draw be the last one once more."""
        self.count -= 1

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)
