"""What every sequence mixer is: a causal map B T D -> B T D with a constant-memory step form.

The two forms are the same function: feeding tokens one at a time through `step`, from `initial_state`, gives what
`forward` gives on the whole sequence (to the solver's tolerance where a solver is involved).
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn


class SequenceMixer(nn.Module, ABC):
    """Mixes information over time, causally; one layer of a model is built around it.

    Args:
        width: channels of the input and of the output.
    """

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

    def diagnostics(self) -> dict[str, Tensor]:
        """What the last `forward` tells about itself, per sequence (B,); empty for mixers that do not iterate."""
        return {}


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
