"""Tensors of any trailing shape as rows of channels, which is how kernels see them."""

from torch import Tensor


def rows(x: Tensor) -> Tensor:
    """(B, T, ...) as (B, T, D) whose rows are contiguous; a copy only where they are not."""
    x = x if x.dim() == 3 else x.unsqueeze(-1).flatten(2)
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
