"""One layer of a model, pre-normalised and residual: x + mixer(norm(x)), then optionally x + mlp(norm(x))."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fprnn_lightning.mixers.base import Cost, SequenceMixer, inner_width


class Block(nn.Module):
    """A sequence mixer, and an MLP if wanted, each on a normalised residual branch.

    Args:
        mixer: makes the sequence mixer from the width.
        width: channels of the residual stream.
        mlp_ratio: hidden channels of the MLP per channel of `width`; 0 leaves the MLP out.
        recompute: whether backward computes what is inside again rather than that forward keeps it.
    """

    def __init__(
        self, mixer: Callable[[int], SequenceMixer], width: int, mlp_ratio: float = 0.0, recompute: bool = False
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mixer = mixer(width)
        self.recompute = recompute
        self.mlp = None
        if mlp_ratio:
            hidden = inner_width(width, mlp_ratio)
            self.mlp = nn.Sequential(
                nn.RMSNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width, bias=False)
            )

    def forward(self, x: Tensor) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return self._forward(x)
        contexts = iter((nullcontext, self.mixer.repeatable()))

        def run(x: Tensor) -> Tensor:
            with next(contexts)():
                return self._forward(x)

        # one repetition, however often a gradient rule walks through the graph of an iteration, so reentrant
        return checkpoint(run, x, use_reentrant=True)

    def _forward(self, x: Tensor) -> Tensor:
        return self._mlp_branch(x + self.mixer(self.norm(x)))

    def prefill(self, x: Tensor) -> tuple[Tensor, Any]:
        mixed, state = self.mixer.prefill(self.norm(x))
        return self._mlp_branch(x + mixed), state

    def step(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        mixed, state = self.mixer.step(self.norm(x), state)
        return self._mlp_branch(x + mixed), state

    def mlp_cost(self) -> Cost:
        """Operations per token of the MLP, 0 if there is none."""
        linear = [] if self.mlp is None else [part for part in self.mlp if isinstance(part, nn.Linear)]
        return Cost(once=2 * sum(part.weight.numel() for part in linear))

    def _mlp_branch(self, x: Tensor) -> Tensor:
        return x if self.mlp is None else x + self.mlp(x)
