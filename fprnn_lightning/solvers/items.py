"""What a solve judges: *items*, indexed by the leading axes of y, each with a residual and a fate of its own.

The relative change of an item and the inner products that an accelerating solver needs run over all that the item
holds, and over nothing else. So where every item settles for itself, none is touched by another: a sequence not by the
others of its batch, and a prefix, where f is causal, not by later tokens.

Source: Fixed-Point RNNs (arXiv 2503.10799), section 4, for the relative change.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Measure = Callable[[Tensor, Tensor], Tensor]


class Items(NamedTuple):
    """A way to cut y into items.

    Args:
        axes: leading axes of y that index the items.
        change: the largest |f(y) - y| of each item relative to its |f(y)|, from y and f(y).
        product: inner product of each item, from two tensors shaped like y.
        change_of_tokens: the change again, from the largest |f(y) - y| and |f(y)| of each token, both (B, T).
        all_settled: whether all items have settled, from whether all of these here have; more than that where there
            are others elsewhere.
    """

    axes: int
    change: Measure
    product: Measure
    change_of_tokens: Measure
    all_settled: Callable[[bool], bool] = bool


def _change_of_sequences(y: Tensor, f_y: Tensor) -> Tensor:
    return relative_change((f_y - y).abs_().flatten(1).amax(1), f_y.abs().flatten(1).amax(1))


def _product_of_sequences(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def _change_of_prefixes(y: Tensor, f_y: Tensor) -> Tensor:
    return change_of_tokens(y, f_y).cummax(1).values


def change_of_tokens(y: Tensor, f_y: Tensor) -> Tensor:
    """The largest |f(y) - y| of each token relative to its |f(y)|: two (B, T, D) -> (B, T)."""
    return relative_change((f_y - y).abs_().amax(-1), f_y.abs().amax(-1))


def _product_of_prefixes(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1).cumsum(1)


def relative_change(change: Tensor, size: Tensor) -> Tensor:
    """change / size, and 0 where nothing changes."""
    return change / size.clamp_min(torch.finfo(size.dtype).tiny)


def _tokens_of_sequences(change: Tensor, size: Tensor) -> Tensor:
    return relative_change(change.amax(1), size.amax(1))


def _tokens_of_prefixes(change: Tensor, size: Tensor) -> Tensor:
    return relative_change(change, size).cummax(1).values


SEQUENCES = Items(1, _change_of_sequences, _product_of_sequences, _tokens_of_sequences)
"""One item for each index of the first axis: y (B, ...) -> (B,)."""

PREFIXES = Items(2, _change_of_prefixes, _product_of_prefixes, _tokens_of_prefixes)
"""One item for each token and all before it, each token's change relative to its own size: y (B, T, D) -> (B, T)."""
