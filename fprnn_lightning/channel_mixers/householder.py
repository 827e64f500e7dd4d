"""Generalised Householder products, Q = H_1 H_2 ... H_R with H_r = I - alpha_r u_r u_r^T, |u_r| = 1, alpha_r in (0, 1).

||Q|| <= 1 always, and ||I - Q|| < 1 for R = 1. In compact form Q = I - U T U^T with U = [u_1 ... u_R] and
T^-1 = diag(1 / alpha) + striu(U^T U), so that with Woodbury's identity

    (I - diag(g) (I - Q))^-1 v = v + g * U K^-1 (alpha * U^T v),    K = I + diag(alpha) (striu(U^T U) - U^T diag(g) U),

which costs O(D R^2 + R^3) and is Sherman-Morrison for R = 1. For R = 1 the matrix is never singular; for R > 1, where
||I - Q|| may exceed 1, it can be, though rarely: the result is then not finite, or very large near by.

Source: Fixed-Point RNNs (arXiv 2503.10799), section 3.3; compact form: Bischof and Van Loan 1987.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fprnn_lightning.channel_mixers.base import ChannelMixer

SHORTEST = 1e-6  # a direction shorter than this is not brought to unit length


class Reflections(NamedTuple):
    """R generalised reflections per token: directions (..., R, D) of unit length, strengths (..., R) in (0, 1)."""

    directions: Tensor
    strengths: Tensor


class Householder(ChannelMixer[Reflections]):
    """A product of R generalised Householder reflections.

    Args:
        channels: D.
        rank: reflections R of the product.

    Raises:
        ValueError: if rank is less than 1 or more than `channels`.
    """

    def __init__(self, channels: int, rank: int = 1) -> None:
        if not 1 <= rank <= channels:
            raise ValueError(f"Householder: rank is {rank}, must be between 1 and the {channels} channels")
        super().__init__(channels, rank * channels + rank)
        self.rank = rank

    def coefficients(self, raw: Tensor) -> Reflections:
        directions, strengths = raw.split((self.rank * self.channels, self.rank), -1)
        directions = functional.silu(directions).unflatten(-1, (self.rank, self.channels))
        return Reflections(functional.normalize(directions, dim=-1, eps=SHORTEST), strengths.sigmoid())

    def residual_apply(self, q: Reflections, v: Tensor) -> Tensor:
        mixed = v
        for r in reversed(range(self.rank)):
            u = q.directions[..., r, :]
            mixed = mixed - (q.strengths[..., r] * (u * mixed).sum(-1))[..., None] * u
        return v - mixed

    def solve(self, q: Reflections, gain: Tensor, v: Tensor) -> Tensor:
        u, alpha = q.directions, q.strengths[..., None]
        gained = u * gain[..., None, :]  # ... R D
        gram = torch.triu(u @ u.mT, diagonal=1) - gained @ u.mT  # ... R R
        kernel = torch.eye(self.rank, dtype=v.dtype, device=v.device) + alpha * gram
        weights, _ = torch.linalg.solve_ex(kernel, alpha * (u @ v[..., None]))  # ... R 1; not finite where singular
        return v + (gained.mT @ weights)[..., 0]
