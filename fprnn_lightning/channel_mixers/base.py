"""A channel mixer is a matrix Q_t on the D channels of one token, known through what it does to vectors.

Its coefficients are a function of `raw_channels` numbers per token, which the sequence mixer projects from the input
and, if wanted, from the previous state. So a channel mixer does not know what its coefficients depend on.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Coefficients = TypeVar("Coefficients")


class ChannelMixer(nn.Module, ABC, Generic[Coefficients]):
    """A family of D x D matrices Q.

    Args:
        channels: D.
        raw_channels: numbers per token that the coefficients of Q are made from.
    """

    def __init__(self, channels: int, raw_channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.raw_channels = raw_channels

    @abstractmethod
    def coefficients(self, raw: Tensor) -> Coefficients:
        """The coefficients of Q from (..., raw_channels)."""

    @abstractmethod
    def residual_apply(self, q: Coefficients, v: Tensor) -> Tensor:
        """(I - Q) v: (..., D) -> (..., D)."""

    @abstractmethod
    def solve(self, q: Coefficients, gain: Tensor, v: Tensor) -> Tensor:
        """The h with (I - diag(gain) (I - Q)) h = v: gain and v (..., D), 0 <= gain < 1 -> (..., D).

        It exists for certain if ||I - Q|| <= 1; where it does not, the result is not finite.
        """

    def apply(self, q: Coefficients, v: Tensor) -> Tensor:
        """Q v: (..., D) -> (..., D)."""
        return v - self.residual_apply(q, v)

    def dense_matrix(self, raw: Tensor) -> Tensor:
        """Q itself: (..., raw_channels) -> (..., D, D). For tests: it costs D applications."""
        identity = torch.eye(self.channels, dtype=raw.dtype, device=raw.device)
        q = self.coefficients(raw[..., None, :])
        return self.apply(q, identity.expand(*raw.shape[:-1], -1, -1)).mT
