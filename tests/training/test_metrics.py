"""Accuracies at every length from one pass, against counting position by position."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fprnn_lightning.training.metrics import (
    AnswerAccuracy,
    LengthAccuracy,
    MeanOverPositions,
    count_by_end,
    last_labels,
    last_token_accuracy,
)

CHANCE = 0.2


def counted_one_by_one(batches, length, overhead=None):
    """[token, last-token, sequence, scaled accuracy, sequences], in plain Python.

    Of the sequences that reach a length, up to there; or, with an overhead, of those whose prompt has the length.
    """
    scored = right = last_right = all_right = sequences = 0
    for predictions, targets in batches:
        for prediction, target in zip(predictions.tolist(), targets.tolist(), strict=True):
            positions = [t for t, label in enumerate(target) if label != -100]
            inside = [t for t in positions if t < length or overhead is not None]
            if inside and (positions[-1] + 1 >= length if overhead is None else inside[0] + 1 - overhead == length):
                hits = [prediction[t] == target[t] for t in inside]
                scored, right = scored + len(hits), right + sum(hits)
                last_right, all_right, sequences = last_right + hits[-1], all_right + all(hits), sequences + 1
    if not sequences:
        return [*[math.nan] * 4, 0]
    last = last_right / sequences
    return [right / scored, last, all_right / sequences, (last - CHANCE) / (1 - CHANCE), sequences]


@st.composite
def labelled_batches(draw):
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.integers(1, 4)), draw(st.integers(1, 7))
        labels = st.lists(st.sampled_from([0, 1, 1, -100]), min_size=shape[1], max_size=shape[1])
        rows = draw(st.lists(st.tuples(labels, labels), min_size=shape[0], max_size=shape[0]))
        targets = torch.tensor([target for target, _ in rows])
        batches.append((torch.tensor([prediction for _, prediction in rows]).clamp(min=0), targets))
    return batches


@given(labelled_batches(), st.sets(st.integers(1, 8), min_size=1))
def test_one_pass_counts_what_a_loop_counts(batches, lengths):
    for overhead in (None, 0, 2):
        if overhead is None:
            metric = LengthAccuracy(sorted(lengths), CHANCE)
        else:
            metric = AnswerAccuracy(sorted(lengths), overhead, CHANCE)
        for predictions, targets in batches:
            metric.update(predictions, targets)
        measured = torch.stack([torch.stack(values) for values in metric.compute().values()], 1)
        expected = torch.tensor([counted_one_by_one(batches, length, overhead) for length in sorted(lengths)])
        torch.testing.assert_close(measured, expected, equal_nan=True, rtol=0, atol=1e-6)


def test_an_answer_counts_at_the_length_of_its_prompt_alone():
    targets = torch.tensor([[-100, -100, 1, 1, 1, -100], [-100, -100, -100, -100, 1, 1]])  # prompts of 3 and 5 tokens
    metric = AnswerAccuracy([1, 3, 4], prompt_overhead=2)
    metric.update(torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]), targets)
    values = {name: [v.item() for v in value] for name, value in metric.compute().items()}
    assert values["sequences"] == [1, 1, 0]
    assert values["token_accuracy"][:2] == [pytest.approx(2 / 3), 1.0]
    assert values["last_token_accuracy"][:2] == values["sequence_accuracy"][:2] == [0.0, 1.0]


def test_shorter_sequences_do_not_count():
    targets = torch.tensor([[1, 1, 1, 1], [1, 1, -100, -100]])
    metric = LengthAccuracy([2, 4, 5])
    metric.update(torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]]), targets)
    values = {name: [v.item() for v in value] for name, value in metric.compute().items()}
    assert values["sequences"] == [2, 1, 0]
    assert values["token_accuracy"][:2] == [0.75, 0.75]
    assert values["last_token_accuracy"][:2] == [1.0, 0.0]
    assert values["sequence_accuracy"][:2] == [0.5, 0.0]


def test_states_of_two_ranks_add_up():
    """What torchmetrics does between ranks (stack, then the declared reduction) gives the metric of all batches."""
    torch.manual_seed(0)
    batches = [(torch.randint(2, (5, 6)), torch.randint(2, (5, 6))) for _ in range(2)]
    together, ranks = LengthAccuracy([3, 6]), [LengthAccuracy([3, 6]) for _ in batches]
    for rank, batch in zip(ranks, batches, strict=True):
        rank.update(*batch)
        together.update(*batch)
    reduce = together._reductions["counts"]
    assert torch.equal(reduce(torch.stack([rank.counts for rank in ranks])), together.counts)


@pytest.mark.parametrize("lengths", [[], [0, 4], [8, 4], [4, 4]])
def test_bad_lengths_are_refused(lengths):
    with pytest.raises(ValueError, match="must be ascending and at least 1"):
        LengthAccuracy(lengths)


@given(labelled_batches())
def test_the_accuracy_of_training_counts_the_longest_sequences_of_all_batches_together(batches):
    batches = [(p, t) for p, t in batches if t.shape[1] == batches[0][1].shape[1]]
    rows = [
        [(t, p == label) for t, (p, label) in enumerate(zip(*row, strict=True)) if label != -100]
        for predictions, targets in batches
        for row in zip(predictions.tolist(), targets.tolist(), strict=True)
    ]
    lasts = [row[-1] for row in rows if row]
    measured = last_token_accuracy(sum(count_by_end(*batch) for batch in batches)).item()
    if lasts:
        longest = [hit for end, hit in lasts if end == max(lasts)[0]]
        assert measured == pytest.approx(sum(longest) / len(longest))
    else:
        assert math.isnan(measured)


def test_a_mean_over_positions_is_the_same_in_any_order():
    generator = torch.Generator().manual_seed(0)
    means, positions = torch.randn(100, generator=generator), torch.randint(0, 9, (100,), generator=generator)
    means[positions == 0] = torch.nan

    def mean(order):
        metric = MeanOverPositions()
        for index in order:
            metric.update(means[index], positions[index])
        return metric.compute()

    expected = mean(range(100))
    weighted = means.nan_to_num() @ positions.float() / positions.sum()
    assert expected.item() == pytest.approx(weighted.item(), abs=1e-6)
    for _ in range(20):
        assert torch.equal(mean(torch.randperm(100, generator=generator)), expected)


@given(labelled_batches())
def test_last_labels(batches):
    targets = batches[0][1]
    for row, kept in zip(targets.tolist(), last_labels(targets).tolist(), strict=True):
        end = max((t for t, label in enumerate(row) if label != -100), default=None)
        assert kept == [label if t == end else -100 for t, label in enumerate(row)]
