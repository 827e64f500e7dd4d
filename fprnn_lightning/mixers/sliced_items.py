"""What a solve judges where sequences are cut in time over ranks: the items of the whole sequences.

A sequence's change and inner product run over all slices, so every rank has the same numbers and stops after the same
iteration. A prefix's run over the slices before and its own tokens; there the ranks agree on when all have settled. One
all-gather of two numbers per sequence, or of one, and of one more for the end, in each iteration.
"""

import torch
from torch import Tensor
from torch.nn import functional

from fprnn_lightning.scan import TimeSlices
from fprnn_lightning.solvers.items import Items, Measure, relative_change


def sliced_items(slices: TimeSlices, x: Tensor) -> tuple[Items, Items, int]:
    """Of the sequences that x (B, T, D) is a slice of: items like SEQUENCES, items like PREFIXES, and their tokens."""
    time = slices.total(torch.tensor(x.shape[1], device=x.device))
    return _sequences(slices), _prefixes(slices, x.device), int(time)


def _sequences(slices: TimeSlices) -> Items:
    """One item for each whole sequence: slices y (B, T, D) -> (B,), the same on every rank."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return slices.total((a * b).flatten(1).sum(1))

    def change_of_tokens(change: Tensor, size: Tensor) -> Tensor:
        # gathered, as what a group's own maximum makes of a nan depends on the group
        return relative_change(*slices.gather(torch.stack([change.amax(1), size.amax(1)])).amax(0))

    return Items(1, _change(change_of_tokens), product, change_of_tokens)


def _prefixes(slices: TimeSlices, device: torch.device) -> Items:
    """One item for each token and all before it, also on other ranks: slices y (B, T, D) -> (B, T)."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        sums = (a * b).sum(-1).cumsum(1)
        return sums + slices.gather(sums[:, -1])[: slices.rank].sum(0)[:, None]

    def change_of_tokens(change: Tensor, size: Tensor) -> Tensor:
        largest = relative_change(change, size).cummax(1).values
        before = slices.gather(largest[:, -1])[: slices.rank]
        return largest.maximum(functional.pad(before, (0, 0, 1, 0)).amax(0)[:, None])  # 0 before the first slice

    def all_settled(here: bool) -> bool:
        return bool(slices.gather(torch.tensor(here, device=device)).all())

    return Items(2, _change(change_of_tokens), product, change_of_tokens, all_settled)


def _change(change_of_tokens: Measure) -> Measure:
    def change(y: Tensor, f_y: Tensor) -> Tensor:
        return change_of_tokens((f_y - y).abs_().amax(-1), f_y.abs().amax(-1))

    return change
