"""Accuracies of label sequences. A causal model's predictions on the first L tokens of a sequence are its predictions
on the sequence of L tokens, so one pass over the longest sequences gives, for every length L in a list,

    token accuracy       right positions / scored positions (micro: over all positions of all sequences)
    last-token accuracy  sequences whose last scored position is right / sequences
    sequence accuracy    sequences whose scored positions are all right / sequences

over the positions before L. Logs also have the last-token accuracy on a scale on which a guess has 0,

    scaled accuracy      (last-token accuracy - chance) / (1 - chance)

Targets of -100 are not scored. A sequence is as long as its last scored position says,
and counts at the lengths that it reaches.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

IGNORED = -100
ACCURACIES = ("token_accuracy", "last_token_accuracy", "sequence_accuracy")


def token_accuracy(predictions: Tensor, targets: Tensor) -> Tensor:
    """Share of the scored positions that are right: predictions (B, T), targets (B, T) -> scalar."""
    return (predictions == targets).sum() / (targets != IGNORED).sum()


def last_token_accuracy(predictions: Tensor, targets: Tensor) -> Tensor:
    """Share of the longest sequences whose last scored position is right: predictions (B, T), targets (B, T) -> scalar.

    The longest are those whose last scored position is the furthest; what shorter ones have right says nothing about
    the length.
    """
    last = _last_scored(targets)[:, -1:]
    longest = (last == last.max()) & (last >= 0)
    right = (predictions == targets).gather(1, last.clamp(min=0)) & longest
    return right.sum() / longest.sum()


def last_labels(targets: Tensor) -> Tensor:
    """The targets with none scored but the last scored of each sequence: (B, T) -> (B, T)."""
    positions = torch.arange(targets.shape[1], device=targets.device)
    return targets.where(positions == _last_scored(targets)[:, -1:], IGNORED)


class LengthAccuracy(Metric):
    """Token, last-token and sequence accuracy at each of several lengths.

    Args:
        lengths: tokens, ascending.

    Raises:
        ValueError: if the lengths are not ascending and at least 1.
    """

    full_state_update = False

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__()
        lengths = list(lengths)
        if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise ValueError(f"lengths to evaluate at are {lengths}, must be ascending and at least 1")
        self.lengths = lengths
        counts = torch.zeros(5, len(lengths), dtype=torch.int64)
        self.add_state("counts", counts, dist_reduce_fx="sum")  # scored, right, last right, all right, sequences

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Counts a batch: predictions (B, T), targets (B, T)."""
        ends = [length - 1 for length in self.lengths if length <= targets.shape[1]]
        hits = predictions == targets
        last = _last_scored(targets)
        counted = (last[:, ends] >= 0) & (last[:, -1:] >= last.new_tensor(ends))  # B K
        scored = (targets != IGNORED).cumsum(1)[:, ends] * counted
        right = hits.cumsum(1)[:, ends] * counted
        last_right = hits.gather(1, last[:, ends].clamp(min=0)) & counted
        all_right = (right == scored) & counted
        counts = torch.stack([scored, right, last_right, all_right, counted]).sum(1)
        self.counts[:, : len(ends)] += counts

    def compute(self) -> dict[str, tuple[Tensor, ...]]:
        """The three accuracies, nan where nothing counted, and `sequences`: a scalar per length each."""
        scored, right, last_right, all_right, sequences = self.counts
        values = (right / scored, last_right / sequences, all_right / sequences, sequences)
        return {name: value.unbind() for name, value in zip((*ACCURACIES, "sequences"), values, strict=True)}


def _last_scored(targets: Tensor) -> Tensor:
    """The last scored position up to each position, -1 before the first: (B, T) -> (B, T)."""
    positions = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
    return positions.where(targets != IGNORED, -1).cummax(1).values
