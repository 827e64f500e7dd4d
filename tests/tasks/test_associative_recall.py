"""Associative recall: answers against a dictionary, distinct keys, the power law, disjoint splits, errors."""

from collections import Counter

import numpy as np
import pytest
import torch

from fprnn_lightning.tasks import AssociativeRecall
from fprnn_lightning.tasks.associative_recall import draw_distinct
from fprnn_lightning.training.metrics import LengthAccuracy


@pytest.mark.parametrize("filler", [True, False])
@pytest.mark.parametrize(("pairs", "length"), [(1, 5), (4, 16), (8, 64), (8, 65)])
def test_every_key_is_asked_for_once_and_answered_with_its_value(pairs, length, filler):
    options = dict(train_length=length, batch_size=50, random_filler=filler)
    task = AssociativeRecall(pairs, vocabulary=4096, **options)
    for tokens, targets in zip(*(part.tolist() for part in task.batch("train", 1)), strict=True):
        given = dict(zip(tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2], strict=True))
        assert len(given) == len(set(given.values())) == pairs
        assert 0 < min(given) <= max(given) < 2048 <= min(given.values()) <= max(given.values()) < 4096
        asked = [position for position, target in enumerate(targets) if target != -100]
        assert {tokens[position]: targets[position] for position in asked} == given
        assert len(asked) == pairs
        assert asked[0] > 2 * pairs  # there is filler before a query
        assert asked[-1] == length - 1
        assert all((length - 1 - position) % 2 == 0 for position in asked)
        rest = [tokens[position] for position in range(2 * pairs, length) if position not in asked]
        assert any(rest) == (filler and bool(rest))


def test_the_first_query_follows_the_power_law():
    """Two keys, one of them moved to the end: the other is asked for where the nearer of two draws is."""
    task = AssociativeRecall(2, 4096, power=0.3, train_length=16, batch_size=2**15)
    _, targets = task.batch("train", 0)
    nearest = ((targets != -100).int().argmax(1) - 5) // 2  # slot, from 0
    weights = np.arange(1, 7) ** (0.3 - 1)
    weights /= weights.sum()
    both = weights[:, None] * weights / (1 - weights)[:, None]  # the second among what the first has left
    np.fill_diagonal(both, 0)
    expected = [both[s, s:].sum() + both[s:, s].sum() for s in range(6)]
    found = torch.bincount(nearest, minlength=6) / len(nearest)
    assert found.tolist() == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("place", [0, 1])
def test_by_a_uniform_law_every_key_is_as_often_the_last(place):
    task = AssociativeRecall(2, 4096, power=1.0, train_length=64, batch_size=2**13)
    tokens, _ = task.batch("train", 0)
    assert (tokens[:, -1] == tokens[:, 2 * place]).double().mean() == pytest.approx(0.5, abs=0.03)


def test_distinct_numbers_are_uniform_in_every_order():
    drawn = draw_distinct(np.random.default_rng(0), range(3, 7), 3, 24_000)
    codes, counts = np.unique(np.array([100, 10, 1]) @ drawn, return_counts=True)
    assert len(codes) == 4 * 3 * 2
    assert all(len(set(str(code))) == 3 for code in codes)
    assert abs(counts - 1000).max() < 5 * 1000**0.5


def test_several_numbers_of_pairs_in_a_batch():
    task = AssociativeRecall([2, 3, 8], vocabulary=512, batch_size=600)
    counts = Counter()
    for tokens, targets in zip(*(part.tolist() for part in task.batch("train", 0)), strict=True):
        asked = [position for position, label in enumerate(targets) if label != -100]
        count = len(asked)
        counts[count] += 1
        given = dict(zip(tokens[0 : 2 * count : 2], tokens[1 : 2 * count : 2], strict=True))
        assert {tokens[position]: targets[position] for position in asked} == given
        assert asked[-1] == task.train_length - 1
    assert set(counts) == {2, 3, 8}
    assert min(counts.values()) > 140


def test_no_evaluation_pairs_occur_in_training():
    options = dict(validation_sequences=4096, validation_lengths=[8])
    task = AssociativeRecall(1, vocabulary=2100, train_length=4, batch_size=2**18, **options)
    train = set(map(tuple, task.batch("train", 0)[0][:, :2].tolist()))
    validation = {tuple(row) for tokens, _ in task.val_dataloader() for row in tokens[:, :2].tolist()}
    assert len(train) > 2e5
    assert len(validation) > 3500
    assert not train & validation


def test_every_sequence_counts_at_its_length_and_nearer():
    task = AssociativeRecall(4, vocabulary=512, test_lengths=[8, 32, 64], test_sequences=200)
    metric = LengthAccuracy(task.test_lengths)
    for _, targets in task.test_dataloader():
        metric.update(targets.clamp(min=0), targets)
    sequences = torch.stack(metric.compute()["sequences"]).tolist()
    assert sequences[0] == 0
    assert sequences[1] > 150
    assert sequences[-1] == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(pairs=0), "pairs must be at least 1, got 0"),
        (dict(pairs=[]), r"pairs must be at least 1, got \[\]"),
        (dict(pairs=[4, 0]), r"pairs must be at least 1, got \[4, 0\]"),
        (dict(pairs=[4, 20]), "train_length must reach 80 tokens to ask for 20 pairs, got 64"),
        (dict(pairs=[8, 1], vocabulary=600), "vocabulary must be larger for 1 pairs .* got 600"),
        (dict(power=-0.1), "power must be from 0 to 1, got -0.1"),
        (dict(power=20.0), "power must be from 0 to 1, got 20"),
        (dict(pairs=20), "train_length must reach 80 tokens to ask for 20 pairs, got 64"),
        (dict(pairs=20, train_length=80, validation_lengths=[16]), "validation_lengths must reach 80 .* got 16"),
        (dict(pairs=20, train_length=80, test_lengths=[64]), "test_lengths must reach 80 .* got 64"),
        (dict(vocabulary=16), "vocabulary must be larger for 8 pairs .* got 16"),
        (dict(vocabulary=-3), "vocabulary must be larger for 8 pairs .* got -3"),
        (dict(pairs=2, vocabulary=12), "vocabulary must be larger for 2 pairs .* got 12"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        AssociativeRecall(**options)
