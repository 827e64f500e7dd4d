"""Diagonal plus low rank (DPLR), Q = I - sum_r alpha_r u_r u_r^T with |u_r| = 1, alpha_r in (0, 1).

With U = [u_1 ... u_R], ||I - Q|| is the largest eigenvalue of diag(alpha)^1/2 U^T U diag(alpha)^1/2: alpha < 1 for
R = 1, where Q is Householder's, but up to sum_r alpha_r where directions agree, and then nothing ensures that the
iteration converges, or that there is a solution. With Woodbury's identity

    (I - diag(g) (I - Q))^-1 v = v + g * U K^-1 (alpha * U^T v),    K = I - diag(alpha) U^T diag(g) U.

Raw terms and the start of training are Householder's: alpha near 1/2, ||I - Q|| 0.5 for R = 1 and 0.6 for R = 4.

Source: Fixed-Point RNNs (arXiv 2503.10799), section 3.3.
"""

import torch
from torch import Tensor

from fprnn_lightning.channel_mixers.base import ChannelMixer, in_full_precision
from fprnn_lightning.channel_mixers.householder import Reflections, reflections
from fprnn_lightning.channel_mixers.spectrum import largest_eigenvalue


class LowRank(ChannelMixer[Reflections]):
    """The identity less R symmetric rank-one terms (DPLR).

    Args:
        channels: D.
        rank: rank-one terms R.
        largest: alpha is in (0, largest). Beyond 1, ||I - Q|| < 1 is lost for R = 1 too: the iteration may diverge,
            and there may be no solution.

    Raises:
        ValueError: if rank is less than 1 or more than `channels`, or largest not above 0 and at most 2.
    """

    def __init__(self, channels: int, rank: int = 1, largest: float = 1.0) -> None:
        if not 1 <= rank <= channels:
            raise ValueError(f"LowRank: rank is {rank}, must be between 1 and the {channels} channels")
        super().__init__(channels, rank * channels + rank, largest)
        self.rank = rank

    def coefficients(self, raw: Tensor) -> Reflections:
        return reflections(raw, self.rank, self.largest)

    def residual_apply(self, q: Reflections, v: Tensor) -> Tensor:
        terms = zip(q.directions.unbind(-2), q.strengths.unbind(-1), strict=True)
        return sum((alpha * (u * v).sum(-1))[..., None] * u for u, alpha in terms)

    def coefficients_flops(self) -> int:
        return 0  # activations and norms

    def residual_flops(self) -> int:
        return 4 * self.rank * self.channels

    def solve_flops(self) -> int:
        return 2 * self.rank * (self.rank + 2) * self.channels + 2 * self.rank**3 // 3

    def describe(self) -> dict[str, str | int | float]:
        return {**super().describe(), "rank": self.rank}

    @in_full_precision
    def residual_bound(self, q: Reflections) -> Tensor:
        """||I - Q|| itself."""
        scaled = q.strengths.sqrt()[..., None] * q.directions
        return largest_eigenvalue(scaled @ scaled.mT)

    @in_full_precision
    def solve(self, q: Reflections, gain: Tensor, v: Tensor) -> Tensor:
        u, alpha = q.directions, q.strengths[..., None]
        gained = u * gain[..., None, :]  # ... R D
        kernel = torch.eye(self.rank, dtype=v.dtype, device=v.device) - alpha * (gained @ u.mT)
        weights, _ = torch.linalg.solve_ex(kernel, alpha * (u @ v[..., None]))  # ... R 1; not finite where singular
        return v + (gained.mT @ weights)[..., 0]
