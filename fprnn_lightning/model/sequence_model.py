"""Tokens to logits: embedding, a stack of blocks, a norm and a head; in parallel over time or one token at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fprnn_lightning.mixers.base import Cost, Profile, SequenceMixer
from fprnn_lightning.model.block import Block


class Part(NamedTuple):
    """What one part of a model has and costs.

    Args:
        name: what it is and where.
        parameters: how many numbers are learnt, those of the norm before it among them.
        cost: operations per token.
        state_bytes: what generation carries from one token of a sequence to the next.
    """

    name: str
    parameters: int
    cost: Cost
    state_bytes: int = 0


class SequenceModel(nn.Module):
    """A causal model of sequences over one vocabulary.

    Args:
        vocab_size: tokens and labels V.
        mixer: makes one layer's sequence mixer from the width; called once per layer.
        width: channels of the residual stream.
        layers: number of blocks.
        mlp_ratio: hidden channels of each block's MLP per channel of `width`; 0 leaves the MLPs out.
        recompute: whether backward computes the inside of each block again rather than that forward keeps it.
    """

    def __init__(
        self,
        vocab_size: int,
        mixer: Callable[[int], SequenceMixer],
        width: int = 128,
        layers: int = 1,
        mlp_ratio: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if width < 1 or layers < 1:
            raise ValueError(f"model has width {width} and {layers} layers, both must be at least 1")
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(mixer, width, mlp_ratio, recompute) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the label at every position: tokens (B, T) -> (B, T, V)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def prefill(self, tokens: Tensor) -> tuple[Tensor, list[Any]]:
        """Logits (B, T, V) of tokens (B, T), in parallel over time, and the state of every layer after the last one."""
        x, states = self.embedding(tokens), []
        for block in self.blocks:
            x, state = block.prefill(x)
            states.append(state)
        return self.head(self.norm(x)), states

    def initial_state(self, batch: int) -> list[Any]:
        """The state of every layer before the first token of `batch` sequences."""
        return [block.mixer.initial_state(batch) for block in self.blocks]

    def step(self, tokens: Tensor, states: list[Any]) -> tuple[Tensor, list[Any]]:
        """One token of each sequence: tokens (B,) and the states so far -> logits (B, V) and the new states."""
        x, new_states = self.embedding(tokens), []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block.step(x, state)
            new_states.append(state)
        return self.head(self.norm(x)), new_states

    def parts(self, time: int) -> list[Part]:
        """The parts from the embedding to the head, in order, on sequences of so many tokens."""
        parts = [Part("embedding", _parameters(self.embedding), Cost(once=0))]
        for layer, block in enumerate(self.blocks):
            mixer, state = block.mixer, block.mixer.state_bytes()
            name = f"layer {layer}, {mixer.describe()['mixer']}"
            parts.append(Part(name, _parameters(block.norm, mixer), mixer.cost(time), state))
            if block.mlp is not None:
                parts.append(Part(f"layer {layer}, MLP", _parameters(block.mlp), block.mlp_cost()))
        head = Cost(once=2 * self.head.weight.numel())
        return [*parts, Part("head", _parameters(self.norm, self.head), head)]

    @torch.no_grad()
    def profile(self, tokens: Tensor) -> list[Profile | None]:
        """What the mixer of every layer does on tokens (B, T), see `SequenceMixer.profile`; in evaluation mode.

        What mixers say of their last forward is of these tokens afterwards, if there are several layers.
        """
        x, profiles = self.embedding(tokens), []
        for before, block in zip([None, *self.blocks], self.blocks, strict=False):
            x = x if before is None else before(x)
            profiles.append(block.mixer.profile(block.norm(x)))
        return profiles

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int) -> Tensor:
        """Continues prompts greedily: prompt (B, T) -> the tokens that follow (B, length).

        The prompt is read in parallel, the rest made token by token in constant memory. T and length are at least 1.
        """
        logits, states = self.prefill(prompt)
        generated = [logits[:, -1].argmax(-1)]
        for _ in range(length - 1):
            logits, states = self.step(generated[-1], states)
            generated.append(logits.argmax(-1))
        return torch.stack(generated, 1)


def _parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
