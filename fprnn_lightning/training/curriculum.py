"""Length curricula: to how many of its first tokens a training batch is cut. The progressive one gets one token longer
whenever the running mean of the last-token accuracy at the current length,

    mean ← smoothing · mean + (1 - smoothing) · accuracy,    mean = 0 at every new length,

passes a threshold. Where a curriculum stands is part of the checkpoint.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from torch import Tensor


class Curriculum(ABC):
    """The training length at every optimiser step, from `start` to `end`."""

    start: int
    end: int

    @abstractmethod
    def length(self, step: int) -> int:
        """Tokens of the training batch after `step` optimiser steps."""

    def observe(self, accuracy: Tensor, step: int) -> None:  # noqa: B027 (most take no note)
        """Takes note of a batch: last-token accuracy (scalar, equal on all ranks) and the optimiser steps before it."""

    def steps_at_end(self, step: int) -> int | None:
        """Optimiser steps since `end` was reached, None before; all of them where nothing is waited for."""
        return step

    def state_dict(self) -> dict[str, int | float | None]:
        """Where the curriculum stands, in plain types."""
        return {}

    def load_state_dict(self, state: dict[str, int | float | None]) -> None:  # noqa: B027
        """Goes on from where another curriculum stood, within its own lengths."""


class FixedLength(Curriculum):
    """The same length throughout.

    Args:
        length: tokens of every training sequence.
    """

    def __init__(self, length: int = 16) -> None:
        _check_lengths(self, length, length)
        self.start = self.end = length

    def length(self, step: int) -> int:
        return self.end


@dataclass
class UniformLengths(Curriculum):
    """One length per batch, uniform from `start` to `end`: a function of the step alone, so equal on all ranks.

    Args:
        start: fewest tokens.
        end: most tokens.
    """

    start: int = 2
    end: int = 16

    def __post_init__(self) -> None:
        _check_lengths(self, self.start, self.end)

    def length(self, step: int) -> int:
        return Random(step).randint(self.start, self.end)


@dataclass
class ProgressiveLengths(Curriculum):
    """Starts short; one token longer whenever the running last-token accuracy passes the threshold.

    Args:
        start: tokens at first.
        end: tokens at last.
        threshold: last-token accuracy to pass, in (0, 1).
        smoothing: weight of the past in the running mean, in [0, 1). The mean starts at 0 at every length, so a length
            takes at least log(1 - threshold) / log(smoothing) steps: 16 at 0.8 and 0.9.
    """

    start: int = 3
    end: int = 16
    threshold: float = 0.8
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        _check_lengths(self, self.start, self.end)
        if not 0 < self.threshold < 1:
            raise ValueError(f"ProgressiveLengths: threshold is {self.threshold}, must be between 0 and 1")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"ProgressiveLengths: smoothing is {self.smoothing}, must be at least 0 and below 1")
        self.current = self.start
        self.running_accuracy = 0.0
        self.end_step = 0 if self.start == self.end else None

    def length(self, step: int) -> int:
        return self.current

    def observe(self, accuracy: Tensor, step: int) -> None:
        if accuracy.isfinite():  # else no position of the batch was scored
            self.running_accuracy = self.smoothing * self.running_accuracy + (1 - self.smoothing) * accuracy.item()
        if self.current < self.end and self.running_accuracy > self.threshold:
            self.current += 1
            self.running_accuracy = 0.0
        if self.current == self.end and self.end_step is None:
            self.end_step = step + 1

    def steps_at_end(self, step: int) -> int | None:
        return None if self.end_step is None else step - self.end_step

    def state_dict(self) -> dict[str, int | float | None]:
        return {"current": self.current, "running_accuracy": self.running_accuracy, "end_step": self.end_step}

    def load_state_dict(self, state: dict[str, int | float | None]) -> None:
        if state:
            self.current = min(max(state["current"], self.start), self.end)
            self.running_accuracy = state["running_accuracy"] if self.current == state["current"] else 0.0
            self.end_step = state["end_step"] if self.current == self.end else None


def _check_lengths(curriculum: Curriculum, start: int, end: int) -> None:
    if start < 1 or start > end:
        lengths = f"start is {start} and end is {end}" if start != end else f"length is {end}"
        raise ValueError(f"{type(curriculum).__name__}: {lengths}, must be at least 1 and in this order")
