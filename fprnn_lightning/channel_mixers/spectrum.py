"""Eigenvalues of many small matrices at once, by matrix products alone: nothing waits for a GPU, nothing raises.

For P with eigenvalues lambda_i >= 0, repeated squaring gives S = P^m / tr P^m, m = 2^k, which tends to the projection
onto the eigenspace of the largest, over its dimension. Then lambda_max ~ tr(P S) = sum_i lambda_i^(m+1) / sum_i
lambda_i^m, too small by at most a share (d - 1) / (e m) whatever the gaps between eigenvalues: for m = 1 / (e eps)
this is d eps, like the rounding of a product of d x d matrices. Its gradient with S held fixed is S: that of
lambda_max where it is simple, and where it is repeated the mean over the eigenspace, a subgradient. It is always
finite, as no difference of eigenvalues is divided by; a second derivative misses how S changes.
"""

import math

import torch
from torch import Tensor

SQUARINGS_PER_SCALING = 3  # from trace 1 no trace falls below d^-7, far from underflow for d <= 1000


def largest_eigenvalue(matrix: Tensor) -> Tensor:
    """lambda_max of matrices (..., d, d) whose eigenvalues are real and not negative: (...,)."""
    with torch.no_grad():
        power, square = matrix.clone(), torch.empty_like(matrix)
        for step in range(_squarings(matrix.dtype)):
            if step % SQUARINGS_PER_SCALING == 0:
                _scale(power)
            torch.matmul(power, power, out=square)
            power, square = square, power
        _scale(power)
    return (matrix * power.mT).sum((-2, -1))


def eigenvalue_flops(size: int) -> int:
    """Operations of `largest_eigenvalue` on one float32 matrix (d, d), a multiplication and an addition being two."""
    return 2 * size**3 * _squarings(torch.float32)


def spectral_norm(matrix: Tensor) -> Tensor:
    """The largest singular value of any matrices (..., d, d): (...,)."""
    return largest_eigenvalue(matrix.mT @ matrix).sqrt()


def _squarings(dtype: torch.dtype) -> int:
    return math.ceil(-math.log2(math.e * torch.finfo(dtype).eps))


def _scale(matrix: Tensor) -> None:
    """Divides matrices (..., d, d) by their trace, in place."""
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    matrix /= trace.clamp_min(torch.finfo(matrix.dtype).tiny)[..., None, None]
