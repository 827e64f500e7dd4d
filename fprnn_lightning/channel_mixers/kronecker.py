"""Kronecker products, Q = K_1 (x) K_2 with K_i = D_i^1/2 P_i D_i^1/2: D_i a diagonal in (0, 1), P_i >= 0, ||P_i|| = 1.

On the d1 x d2 grid V of the channels Q V = K_1 V K_2^T. The eigenvalues of Q are the products of theirs, so in [0, 1],
and ||I - Q|| <= 1 always, less than 1 unless a K_i is singular.

P_i = L_i L_i^T / ||L_i L_i^T|| with L_i = I + raw / d_i, divided by the true spectral norm, not by a bound on it, and
D_i = sigmoid(raw + SHIFT): Q = I / 2 where raw terms are 0. Training starts with raw terms of 0.3 (0.65 where they read
the state), eigenvalues between 0 and 1/2, for D = 256 0.34 (0.23) on average, and ||I - Q|| = 0.80 (0.93). With
raw / sqrt(d_i) instead they are 0.15 (0.08) and 0.98 (1.00), and A5 was learnt more slowly (D = 64, one run each).

Source: Fixed-Point RNNs (arXiv 2503.10799), section 3.3.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fprnn_lightning.channel_mixers.base import ChannelMixer, in_full_precision
from fprnn_lightning.channel_mixers.grid import rows_and_columns
from fprnn_lightning.channel_mixers.householder import SHORTEST
from fprnn_lightning.channel_mixers.spectrum import eigenvalue_flops, largest_eigenvalue

LONGEST_SIDE = 64  # a side d costs d^2 raw terms and some d^3 log(1 / eps) operations per token
SHIFT = -math.log(math.sqrt(2) - 1)  # sigmoid(SHIFT)^2 = 1/2


class Factors(NamedTuple):
    """K_1 (..., d1, d1), times `largest`, and K_2 (..., d2, d2), both symmetric."""

    rows: Tensor
    columns: Tensor


class Kronecker(ChannelMixer[Factors]):
    """The Kronecker product of two small positive matrices.

    Args:
        channels: D.
        rows: d1, the size of the first factor; d2 = D / d1 is that of the second. As square as possible if not given.
        largest: eigenvalues of Q are in [0, largest]. Beyond 1 some directions are amplified, and I - Q has eigenvalues
            of both signs; ||I - Q|| <= 1 still holds.

    Raises:
        ValueError: if rows does not divide `channels`, a side is longer than 64, or largest not above 0 and at most 2.
    """

    def __init__(self, channels: int, rows: int | None = None, largest: float = 1.0) -> None:
        d1, d2 = rows_and_columns("Kronecker", channels, rows)
        if max(d1, d2) > LONGEST_SIDE:
            raise ValueError(f"Kronecker: {channels} channels as {d1} x {d2}, no side must be over {LONGEST_SIDE}")
        super().__init__(channels, d1 * d1 + d1 + d2 * d2 + d2, largest)
        self.sides = d1, d2

    @in_full_precision
    def coefficients(self, raw: Tensor) -> Factors:
        d1, d2 = self.sides
        rows, columns = raw.split((d1 * d1 + d1, d2 * d2 + d2), -1)
        return Factors(self.largest * _factor(rows, d1), _factor(columns, d2))

    @in_full_precision
    def residual_apply(self, q: Factors, v: Tensor) -> Tensor:
        return v - (q.rows @ v.unflatten(-1, self.sides) @ q.columns).flatten(-2)

    def coefficients_flops(self) -> int:
        return sum(2 * side**3 + eigenvalue_flops(side) for side in self.sides)

    def residual_flops(self) -> int:
        return 2 * self.channels * sum(self.sides)

    @in_full_precision
    def residual_bound(self, q: Factors) -> Tensor:
        """||I - Q|| itself."""
        largest = largest_eigenvalue(q.rows) * largest_eigenvalue(q.columns)
        return torch.maximum(1 - _smallest_eigenvalue(q.rows) * _smallest_eigenvalue(q.columns), largest - 1)


def _factor(raw: Tensor, size: int) -> Tensor:
    """K = D^1/2 P D^1/2 from [L d d | D d]."""
    root, diagonal = raw.split((size * size, size), -1)
    identity = torch.eye(size, dtype=raw.dtype, device=raw.device)
    root = identity + root.unflatten(-1, (size, size)) / size
    square = root @ root.mT
    norm = largest_eigenvalue(square).clamp_min(SHORTEST**2)
    scale = (functional.logsigmoid(diagonal + SHIFT) / 2).exp()  # the root of the sigmoid, smooth at 0 too
    return scale[..., :, None] * scale[..., None, :] * square / norm[..., None, None]


def _smallest_eigenvalue(matrix: Tensor) -> Tensor:
    """Of symmetric, positive semidefinite matrices (..., d, d): (...,)."""
    above = largest_eigenvalue(matrix)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return above - largest_eigenvalue(above[..., None, None] * identity - matrix)
