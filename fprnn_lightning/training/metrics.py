"""Accuracies of label sequences, at every length L in a list,

    token accuracy       right positions / scored positions (micro: over all positions of all sequences)
    last-token accuracy  sequences whose last scored position is right / sequences
    sequence accuracy    sequences whose scored positions are all right / sequences
    scaled accuracy      (last-token accuracy - chance) / (1 - chance), on which a guess has 0

Targets of -100 are not scored. A causal model's predictions on the first L tokens of a sequence are its predictions on
the sequence of L tokens, so one pass over the longest sequences gives the accuracies over the positions before L for
every L: `LengthAccuracy`. A prompt's answer is no prefix of the answer to a longer one: `AnswerAccuracy` counts each at
its own length only.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

IGNORED = -100


def count_by_end(predictions: Tensor, targets: Tensor) -> Tensor:
    """Sequences by their last scored position, and those of them that are right there; counts of batches add up.

    Args:
        predictions: (B, T).
        targets: (B, T).

    Returns:
        Whole numbers (2, T) in float32.
    """
    last = _last_scored(targets)[:, -1]
    right = (predictions == targets).gather(1, last.clamp(min=0)[:, None])[:, 0]
    counts = torch.zeros(2, targets.shape[1] + 1, device=targets.device)
    return counts.index_add_(1, last + 1, torch.stack([torch.ones_like(right), right]).float())[:, 1:]


def last_token_accuracy(counts: Tensor) -> Tensor:
    """Share of the longest sequences whose last scored position is right: what `count_by_end` counts -> scalar.

    The longest are those whose last scored position is the furthest; what shorter ones have right says nothing about
    the length. It is nan where nothing is scored.
    """
    ends = torch.arange(counts.shape[1], device=counts.device)
    longest = (ends * (counts[0] > 0)).argmax()
    sequences, right = counts[:, longest]
    return right / sequences


def last_labels(targets: Tensor) -> Tensor:
    """The targets with none scored but the last scored of each sequence: (B, T) -> (B, T)."""
    positions = torch.arange(targets.shape[1], device=targets.device)
    return targets.where(positions == _last_scored(targets)[:, -1:], IGNORED)


class MeanOverPositions(Metric):
    """The mean over the scored positions of several batches, equal to all digits in whatever order ranks have them."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("means", [], dist_reduce_fx="cat")
        self.add_state("positions", [], dist_reduce_fx="cat")

    def update(self, mean: Tensor, positions: Tensor) -> None:
        """Adds a batch: the mean over its scored positions, nan if there are none, and their number, both scalars."""
        self.means.append(mean.detach()[None])
        self.positions.append(positions[None])

    def compute(self) -> Tensor:
        """The mean, nan if no position is scored."""
        means, positions = (dim_zero_cat(part).cpu().double() for part in (self.means, self.positions))
        return ((means * positions)[positions > 0].sum() / positions.sum()).float()


class AccuracyByLength(Metric):
    """Token, last-token, sequence and scaled accuracy at each of several lengths.

    Args:
        lengths: tokens, ascending.
        chance: last-token accuracy of a guess.

    Raises:
        ValueError: if the lengths are not ascending and at least 1.
    """

    full_state_update = False

    def __init__(self, lengths: Sequence[int], chance: float = 0.0) -> None:
        super().__init__()
        lengths = list(lengths)
        if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise ValueError(f"lengths to evaluate at are {lengths}, must be ascending and at least 1")
        self.lengths = lengths
        self.chance = chance
        counts = torch.zeros(5, len(lengths), dtype=torch.int64)
        self.add_state("counts", counts, dist_reduce_fx="sum")  # scored, right, last right, all right, sequences

    @abstractmethod
    def count(self, hits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What counts of each sequence at each length, (B, K) for the first K lengths.

        Args:
            hits: whether a scored position is right (B, T).
            targets: (B, T).

        Returns:
            Its scored positions, how many are right, whether the last is, and whether the sequence counts: 0 where not.
        """

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Counts a batch: predictions (B, T), targets (B, T)."""
        scored, right, last_right, counted = self.count(predictions == targets, targets)
        all_right = (right == scored) & counted
        counts = torch.stack([scored, right, last_right, all_right, counted]).sum(1)
        self.counts[:, : counts.shape[1]] += counts

    def compute(self) -> dict[str, tuple[Tensor, ...]]:
        """The four accuracies, nan where nothing counted, and `sequences`: a scalar per length each."""
        scored, right, last_right, all_right, sequences = self.counts
        values = {
            "token_accuracy": right / scored,
            "last_token_accuracy": last_right / sequences,
            "sequence_accuracy": all_right / sequences,
            "scaled_accuracy": (last_right / sequences - self.chance) / (1 - self.chance),
            "sequences": sequences,
        }
        return {name: value.unbind() for name, value in values.items()}


class LengthAccuracy(AccuracyByLength):
    """Accuracies over the positions before each length.

    A sequence is as long as its last scored position says, and counts at the lengths that it reaches.

    Args:
        lengths: tokens, ascending.
        chance: last-token accuracy of a guess.
    """

    def count(self, hits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ends = [length - 1 for length in self.lengths if length <= targets.shape[1]]
        last = _last_scored(targets)
        counted = (last[:, ends] >= 0) & (last[:, -1:] >= last.new_tensor(ends))
        scored = (targets != IGNORED).cumsum(1)[:, ends] * counted
        right = hits.cumsum(1)[:, ends] * counted
        last_right = hits.gather(1, last[:, ends].clamp(min=0)) & counted
        return scored, right, last_right, counted


class AnswerAccuracy(AccuracyByLength):
    """Accuracies of answers to prompts, a prompt being what comes up to the first scored position.

    A sequence counts at one length, that of its prompt less `prompt_overhead`.

    Args:
        lengths: tokens of prompts less the overhead, ascending.
        prompt_overhead: tokens of every prompt that do not count for its length.
        chance: last-token accuracy of a guess.
    """

    def __init__(self, lengths: Sequence[int], prompt_overhead: int, chance: float = 0.0) -> None:
        super().__init__(lengths, chance)
        self.prompt_overhead = prompt_overhead

    def count(self, hits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        prompts = first_scored(targets)[:, None] + 1 - self.prompt_overhead
        scored = (targets != IGNORED).sum(1, keepdim=True)
        counted = (prompts == prompts.new_tensor(self.lengths)) & (scored > 0)
        last = _last_scored(targets)[:, -1:].clamp(min=0)
        return scored * counted, hits.sum(1, keepdim=True) * counted, hits.gather(1, last) & counted, counted


def first_scored(targets: Tensor) -> Tensor:
    """The first scored position of each sequence, 0 if there is none: (B, T) -> (B,)."""
    return (targets != IGNORED).int().argmax(1)


def _last_scored(targets: Tensor) -> Tensor:
    """The last scored position up to each position, -1 before the first: (B, T) -> (B, T)."""
    positions = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
    return positions.where(targets != IGNORED, -1).cummax(1).values
