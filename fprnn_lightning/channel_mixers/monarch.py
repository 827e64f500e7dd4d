"""Monarch matrices, Q = L R: two block-diagonal factors, a permutation between, on the d1 x d2 grid V of the channels.

R mixes within each row of the grid and L within each column; the permutation between is the transposition of the grid.
Every block is one generalised reflection, so a token's Q has some 2 D coefficients; the two factors reach every channel
from every other:

    R V: row i     <- (I - beta_i r_i r_i^T) row i,          |r_i| = 1, beta_i in (0, 1)
    L V: column j  <- (I - alpha_j l_j l_j^T) column j,      |l_j| = 1, alpha_j in (0, 1)

||Q|| <= 1. ||I - Q|| <= max alpha + max beta, and never above 2 / sqrt(3): it is convex in L and in R, so largest where
both are projections; these fall apart into pairs in planes, of which the worst (cos^2 = 1/3) has that norm. Contraction
is thus certain where alpha + beta < 1, or the gain is below sqrt(3) / 2. I - Q has rank d1 + d2: Woodbury's identity
solves for the weights in (I - Q) h = sum_i (beta_i r_i^T h) r_i + sum_j (alpha_j l_j^T R h) l_j.

Training starts near alpha = beta = 1/2, with ||I - Q|| = 0.7.

Source: Monarch (arXiv 2204.00595) for the structure; the blocks and their bound are ours.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fprnn_lightning.channel_mixers.base import ChannelMixer
from fprnn_lightning.channel_mixers.grid import rows_and_columns
from fprnn_lightning.channel_mixers.householder import SHORTEST


class GridReflections(NamedTuple):
    """Unit directions in the rows and in the columns (..., d1, d2) and their strengths (..., d1) and (..., d2)."""

    in_rows: Tensor
    in_columns: Tensor
    row_strengths: Tensor
    column_strengths: Tensor


class Monarch(ChannelMixer[GridReflections]):
    """A reflection within each row, then one within each column, of the channels laid out as a grid.

    Args:
        channels: D.
        rows: d1, rows of the grid; it has d2 = D / d1 columns. As square as possible if not given.
        largest: alpha and beta are in (0, largest). Beyond 1 a reflection turns its direction round (eigenvalue
            1 - alpha < 0), and ||I - Q|| may reach 2: the iteration may diverge, and there may be no solution.

    Raises:
        ValueError: if rows does not divide `channels`, or largest not above 0 and at most 2.
    """

    def __init__(self, channels: int, rows: int | None = None, largest: float = 1.0) -> None:
        d1, d2 = rows_and_columns("Monarch", channels, rows)
        super().__init__(channels, 2 * channels + d1 + d2, largest)
        self.sides = d1, d2

    def coefficients(self, raw: Tensor) -> GridReflections:
        d1, d2 = self.sides
        in_rows, in_columns, strengths = raw.split((self.channels, self.channels, d1 + d2), -1)
        in_rows = functional.silu(in_rows).unflatten(-1, (d1, d2))
        in_columns = functional.silu(in_columns).unflatten(-1, (d2, d1))
        return GridReflections(
            functional.normalize(in_rows, dim=-1, eps=SHORTEST),
            functional.normalize(in_columns, dim=-1, eps=SHORTEST).mT.contiguous(),
            *(self.largest * strengths.sigmoid()).split((d1, d2), -1),
        )

    def residual_apply(self, q: GridReflections, v: Tensor) -> Tensor:
        grid = v.unflatten(-1, self.sides)
        across = (q.row_strengths * (q.in_rows * grid).sum(-1))[..., :, None] * q.in_rows
        down = (q.column_strengths * (q.in_columns * (grid - across)).sum(-2))[..., None, :] * q.in_columns
        return (across + down).flatten(-2)

    def coefficients_flops(self) -> int:
        return 0  # activations and norms

    def residual_flops(self) -> int:
        return 8 * self.channels

    def solve_flops(self) -> int:
        return 14 * self.channels + 2 * sum(self.sides) ** 3 // 3

    def residual_bound(self, q: GridReflections) -> Tensor:
        furthest = 2 / math.sqrt(3) if self.largest <= 1 else 2.0
        return (q.row_strengths.amax(-1) + q.column_strengths.amax(-1)).clamp_max(furthest)

    def solve(self, q: GridReflections, gain: Tensor, v: Tensor) -> Tensor:
        r, l, beta, alpha = q  # noqa: E741
        gain, grid = (part.unflatten(-1, self.sides) for part in (gain, v))
        between = r * l  # ... d1 d2: r_i^T l_j, as row i and column j share one channel
        gained = gain * between
        kernel = torch.cat(
            [
                torch.cat([torch.diag_embed(1 - beta * (gain * r * r).sum(-1)), -beta[..., None] * gained], -1),
                torch.cat(
                    [alpha[..., None] * (between - gained).mT, torch.diag_embed(1 - alpha * (gain * l * l).sum(-2))], -1
                ),
            ],
            -2,
        )
        right = torch.cat([beta * (r * grid).sum(-1), alpha * (l * grid).sum(-2)], -1)
        weights, _ = torch.linalg.solve_ex(kernel, right[..., None])  # ... d1 + d2, 1; not finite where singular
        across, down = weights[..., 0].split(self.sides, -1)
        return v + (gain * (across[..., :, None] * r + down[..., None, :] * l)).flatten(-2)
