"""Generalised Householder products, Q = H_1 H_2 ... H_R with H_r = I - alpha_r u_r u_r^T, |u_r| = 1, alpha_r in (0, 1).

||Q|| <= 1 always, and ||I - Q|| = alpha < 1 for R = 1, at most sqrt(R) otherwise. In compact form Q = I - U T U^T with
U = [u_1 ... u_R] and T^-1 = diag(1 / alpha) + striu(U^T U), so that with Woodbury's identity

    (I - diag(g) (I - Q))^-1 v = v + g * U K^-1 (alpha * U^T v),    K = I + diag(alpha) (striu(U^T U) - U^T diag(g) U),

which costs O(D R^2 + R^3) and is Sherman-Morrison for R = 1. For R = 1 the matrix is never singular; for R > 1, where
||I - Q|| may exceed 1, it can be, though rarely: the result is then not finite, or very large near by.

Training starts near alpha = 1/2, in directions that are nearly orthogonal: ||I - Q|| is 0.5 for R = 1, 0.6 for R = 4.

Source: Fixed-Point RNNs (arXiv 2503.10799), section 3.3; compact form: Bischof and Van Loan 1987.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fprnn_lightning.channel_mixers.base import ChannelMixer, in_full_precision
from fprnn_lightning.channel_mixers.spectrum import largest_eigenvalue

SHORTEST = 1e-6  # a direction shorter than this is not brought to unit length


class Reflections(NamedTuple):
    """R rank-one terms per token: directions u (..., R, D) of unit length, strengths alpha (..., R)."""

    directions: Tensor
    strengths: Tensor


def reflections(raw: Tensor, rank: int, largest: float) -> Reflections:
    """u = silu(raw) / |silu(raw)| and alpha = largest * sigmoid(raw), from [directions R D | strengths R]."""
    directions, strengths = raw.split((raw.shape[-1] - rank, rank), -1)
    directions = functional.silu(directions).unflatten(-1, (rank, -1))
    strengths = strengths.sigmoid() if largest == 1 else largest * strengths.sigmoid()
    return Reflections(functional.normalize(directions, dim=-1, eps=SHORTEST), strengths)


class Householder(ChannelMixer[Reflections]):
    """A product of R generalised Householder reflections.

    Args:
        channels: D.
        rank: reflections R of the product.
        largest: alpha is in (0, largest). Beyond 1 a reflection turns its direction round (eigenvalue 1 - alpha < 0),
            but ||I - Q|| < 1 is lost: the iteration may diverge, and there may be no solution.

    Raises:
        ValueError: if rank is less than 1 or more than `channels`, or largest not above 0 and at most 2.
    """

    def __init__(self, channels: int, rank: int = 1, largest: float = 1.0) -> None:
        if not 1 <= rank <= channels:
            raise ValueError(f"Householder: rank is {rank}, must be between 1 and the {channels} channels")
        super().__init__(channels, rank * channels + rank, largest)
        self.rank = rank

    def coefficients(self, raw: Tensor) -> Reflections:
        return reflections(raw, self.rank, self.largest)

    def residual_apply(self, q: Reflections, v: Tensor) -> Tensor:
        mixed = v
        for u, alpha in zip(reversed(q.directions.unbind(-2)), reversed(q.strengths.unbind(-1)), strict=True):
            mixed = mixed - (alpha * (u * mixed).sum(-1))[..., None] * u
        return v - mixed

    def coefficients_flops(self) -> int:
        return 0  # activations and norms

    def residual_flops(self) -> int:
        return 4 * self.rank * self.channels

    def solve_flops(self) -> int:
        return 4 * self.rank * (self.rank + 1) * self.channels + 2 * self.rank**3 // 3

    def describe(self) -> dict[str, str | int | float]:
        return {**super().describe(), "rank": self.rank}

    @in_full_precision
    def residual_bound(self, q: Reflections) -> Tensor:
        """||I - Q|| itself, the square root of the largest eigenvalue of T^T G T G with G = U^T U."""
        if self.rank == 1:
            return q.strengths[..., 0]
        gram = q.directions @ q.directions.mT
        strengths = q.strengths[..., None]
        upper = torch.triu(strengths * gram, diagonal=1)
        compact = torch.linalg.solve_triangular(upper, torch.diag_embed(q.strengths), upper=True, unitriangular=True)
        return largest_eigenvalue(compact.mT @ gram @ compact @ gram).sqrt()

    @in_full_precision
    def solve(self, q: Reflections, gain: Tensor, v: Tensor) -> Tensor:
        u, alpha = q.directions, q.strengths[..., None]
        gained = u * gain[..., None, :]  # ... R D
        gram = torch.triu(u @ u.mT, diagonal=1) - gained @ u.mT  # ... R R
        kernel = torch.eye(self.rank, dtype=v.dtype, device=v.device) + alpha * gram
        weights, _ = torch.linalg.solve_ex(kernel, alpha * (u @ v[..., None]))  # ... R 1; not finite where singular
        return v + (gained.mT @ weights)[..., 0]
