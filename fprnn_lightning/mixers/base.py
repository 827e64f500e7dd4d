"""What every sequence mixer is: a causal map B T D -> B T D with a constant-memory step form.

The two forms are the same function: feeding tokens one at a time through `step`, from `initial_state`, gives what
`forward` gives on the whole sequence (to the solver's tolerance where a solver is involved).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor, nn


class Cost(NamedTuple):
    """Operations per token of a forward, by formula; a multiplication and an addition are two.

    Counted are products with matrices and vectors, the convolution and the recurrence; not counted are embeddings,
    norms, activation functions and products of gates, some 20 per channel.

    Args:
        once: of what is computed once.
        per_iteration: of every iteration; 0 where nothing iterates.
        iterations: the most in training, or their mean where that is drawn; 0 where nothing iterates.
    """

    once: int
    per_iteration: int = 0
    iterations: float = 0.0

    @property
    def most(self) -> float:
        """Operations with all of the iterations."""
        return self.once + self.per_iteration * self.iterations


class Iteration(NamedTuple):
    """How an iteration went on.

    Args:
        residuals: relative change of every token in each of K iterations, its largest |f(y) - y| over its largest
            |f(y)|: (K, B, T).
        tolerance: relative change below which a token has converged.
        training_iterations: the most in training, or their mean where that is drawn.
    """

    residuals: Tensor
    tolerance: float
    training_iterations: float


class Profile(NamedTuple):
    """What a mixer does on given sequences.

    Args:
        decays: what is kept of the state from one token to the next, each in [0, 1]: (numbers,).
        contraction: ||diag(gain_t) (I - Q_t)|| of every token (B, T), by which an iteration brings a token nearer to
            its fixed point given the tokens before it; estimated from below. None where Q = I.
        contraction_bound: max(gain_t) times a bound on ||I - Q_t||, which it is at most: (B, T).
        iteration: how the iteration went on; None where nothing iterates.
    """

    decays: Tensor
    contraction: Tensor | None = None
    contraction_bound: Tensor | None = None
    iteration: Iteration | None = None


class SequenceMixer(nn.Module, ABC):
    """Mixes information over time, causally; one layer of a model is built around it.

    Args:
        width: channels of the input and of the output.
    """

    can_be_sliced = False  # whether processes can each have a slice in time of longer sequences (`context_parallel`)

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"{type(self).__name__}: width is {width}, must be at least 1")
        self.width = width

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Mixes whole sequences: (B, T, width) -> (B, T, width)."""

    @abstractmethod
    def prefill(self, x: Tensor) -> tuple[Tensor, Any]:
        """What `forward` gives, and the state after the last token, to go on from with `step`."""

    @abstractmethod
    def initial_state(self, batch: int) -> Any:
        """The state before the first token of `batch` sequences: tensors on the parameters' device."""

    @abstractmethod
    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Mixes one token: (B, width) and the state so far -> (B, width) and the new state."""

    @abstractmethod
    def cost(self, time: int) -> Cost:
        """Operations per token of a forward over sequences of so many tokens."""

    def describe(self) -> dict[str, str | int | float]:
        """What tables say of the mixer: its name, as a run's folder has it, and its parts and settings, if any."""
        return {"mixer": snake_case(type(self).__name__.removesuffix("Mixer"))}

    def state_bytes(self) -> int:
        """Bytes that generation carries from one token of a sequence to the next."""
        return sum(part.numel() * part.element_size() for part in _tensors(self.initial_state(1)))

    def profile(self, x: Tensor) -> Profile | None:
        """What the mixer does on x (B, T, width), without gradient, in evaluation mode; None if there is no telling.

        It changes nothing: neither the mixer, nor what it says of its last forward, nor a random state.
        """
        return None

    def decide_jointly(self) -> None:
        """Has what is decided in training, such as when an iteration stops, decided by all ranks together."""

    def go_on_with_step(self) -> None:
        """Called before a `forward` in training for the optimiser step of the one before it, as of accumulated batches.

        What is drawn at random for a step is not drawn anew then. A loop that never calls it, as one that does not
        accumulate need not, has every forward in training draw for itself.
        """

    def diagnostics(self) -> dict[str, Tensor]:
        """What the last `forward` tells about itself, per sequence (B,); empty for mixers that do not iterate."""
        return {}

    def repeatable(self) -> Callable[[], AbstractContextManager[None]]:
        """Called before a `forward`: makes a context in which that can be done again, equal and unnoticed.

        Only mixers that remember anything from one forward to the next have to do anything for it.
        """
        return nullcontext


def snake_case(name: str) -> str:
    """FixedPoint as fixed_point."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _tensors(state: Any) -> Iterator[Tensor]:
    """The tensors of a state, which may be nested tuples."""
    if isinstance(state, Tensor):
        yield state
    else:
        for part in state:
            yield from _tensors(part)


def inner_width(width: int, expand: float) -> int:
    """Channels D inside a mixer, `expand * width`.

    Raises:
        ValueError: if that is not a whole number of at least 1.
    """
    inner = expand * width
    if inner < 1 or inner != int(inner):
        raise ValueError(
            f"expand {expand:g} times width {width} gives {inner:g} channels, must be a whole number of at least 1"
        )
    return int(inner)
