"""Learning-rate schedules: the factor on the base rate for the optimiser step that follows `step` steps,

    warm-up   min(1, (step + 1) / warmup_steps)
    cosine    (1 + cos(π · progress)) / 2, progress from 0 to 1

and when training is over. A schedule may wait for the curriculum: `steps_at_end` counts the optimiser steps since the
curriculum reached its last length and is None before.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import cos, pi


class Schedule(ABC):
    """How the learning rate goes over the optimiser steps."""

    @abstractmethod
    def factor(self, step: int, steps_at_end: int | None) -> float:
        """What the base learning rate is multiplied with after `step` optimiser steps."""

    def finished(self, step: int, steps_at_end: int | None) -> bool:
        """Whether the learning rate stays 0 from `step` on, so that training stops."""
        return False


@dataclass(frozen=True)
class WarmupConstant(Schedule):
    """Linear warm-up, then constant.

    Args:
        warmup_steps: optimiser steps until the full learning rate.
    """

    warmup_steps: int = 100

    def __post_init__(self) -> None:
        _check(self, warmup_steps=0)

    def factor(self, step: int, steps_at_end: int | None) -> float:
        return _warmup(step, self.warmup_steps)


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Linear warm-up, then a cosine to 0 at `total_steps`, where training stops.

    Args:
        warmup_steps: optimiser steps until the full learning rate.
        total_steps: optimiser steps in all, warm-up included.
    """

    warmup_steps: int = 100
    total_steps: int = 1000

    def __post_init__(self) -> None:
        _check(self, warmup_steps=0, total_steps=self.warmup_steps + 1)

    def factor(self, step: int, steps_at_end: int | None) -> float:
        return _warmup(step, self.warmup_steps) * _cosine(
            step - self.warmup_steps, self.total_steps - self.warmup_steps
        )

    def finished(self, step: int, steps_at_end: int | None) -> bool:
        return step >= self.total_steps


@dataclass(frozen=True)
class WarmupHoldCosine(Schedule):
    """Linear warm-up, constant until the curriculum reaches its last length, then a cosine to 0, where training stops.

    Args:
        warmup_steps: optimiser steps until the full learning rate.
        decay_steps: optimiser steps of the cosine.
    """

    warmup_steps: int = 100
    decay_steps: int = 600

    def __post_init__(self) -> None:
        _check(self, warmup_steps=0, decay_steps=1)

    def factor(self, step: int, steps_at_end: int | None) -> float:
        return _warmup(step, self.warmup_steps) * _cosine(steps_at_end or 0, self.decay_steps)

    def finished(self, step: int, steps_at_end: int | None) -> bool:
        return steps_at_end is not None and steps_at_end >= self.decay_steps


def _warmup(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / max(1, steps))


def _cosine(step: int, steps: int) -> float:
    return (1 + cos(pi * min(max(step / steps, 0.0), 1.0))) / 2


def _check(schedule: Schedule, **smallest: int) -> None:
    for name, least in smallest.items():
        if getattr(schedule, name) < least:
            raise ValueError(
                f"{type(schedule).__name__}: {name} is {getattr(schedule, name)}, must be at least {least}"
            )
