"""The word problem: labels against a naive checker, disjoint splits, uniform tokens, names and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fprnn_lightning.tasks import WordProblem
from fprnn_lightning.tasks.groups import few_generators, make_group
from fprnn_lightning.tasks.splits import OWNERS, owner_of


def prefixes(task, split, batches):
    """Which of all prefixes of k letters occur: (letters^k,) bool."""
    k, letters = task.prefix_length, len(task.generators)
    met = np.zeros(letters**k, bool)
    for index in range(batches):
        places = np.searchsorted(task.generators, task.batch(split, index)[0][:, :k].numpy())
        met[places @ letters ** np.arange(k)] = True
    return met


@settings(max_examples=25, deadline=None)
@given(
    group=st.sampled_from(["Z2", "Z7", "S3", "S4", "A4", "A5", "S5", "A4xZ2", "S3xZ2xZ2", "Z2000"]),
    length=st.integers(1, 40),
    sequences=st.integers(1, 9),
    index=st.integers(0, 2**40),
    split=st.sampled_from(["train", "validation"]),
    generators=st.sampled_from(["all", "few"]),
)
def test_targets_are_running_products(group, length, sequences, index, split, generators):
    task = WordProblem(group, generators, batch_size=sequences, train_length=length, validation_lengths=[length])
    table = make_group(group).table
    tokens, targets = task.batch(split, index if split == "train" else index % 4)
    for row, labels in list(zip(tokens.tolist(), targets.tolist(), strict=True))[:9]:
        product = 0
        for token, label in zip(row, labels, strict=True):
            product = table[product, token]
            assert label == product


def test_targets_move_things_in_reading_order():
    task = WordProblem("S5", train_length=12, batch_size=20)
    elements = make_group("S5").elements
    for tokens, targets in zip(*(array.tolist() for array in task.batch("train", 0)), strict=True):
        place = list(range(5))  # where each thing is now
        for token, target in zip(tokens, targets, strict=True):
            place = [elements[token][i] for i in place]
            assert tuple(place) == elements[target]


@pytest.mark.parametrize(
    ("group", "name", "order", "k"),
    [("A5", "a5", 60, 4), ("S5", "s5", 120, 3), ("A4xZ2", "a4xz2", 24, 5), ("Z2", "z2", 2, 20), ("S3", "s3", 6, 8)],
)
def test_name_vocabulary_and_prefix_length(group, name, order, k):
    task = WordProblem(group)
    assert (task.name, task.vocab_size, task.prefix_length) == (name, order, k)
    assert order**k >= 2**20 > order ** (k - 1)


def test_every_prefix_has_one_owner_and_few_are_held_out():
    everything = np.array(np.unravel_index(np.arange(6**8), (6,) * 8))
    shares = np.bincount(owner_of(everything, 6).astype(int), minlength=3) / 6**8
    expected = {"validation": 1 / 32, "test": 1 / 32, "train": 30 / 32}
    assert shares == pytest.approx([expected[split] for split in OWNERS], abs=0.001)


@pytest.mark.parametrize(("group", "generators", "batches"), [("S3", "all", 16), ("A5", "all", 8), ("A5", "few", 8)])
def test_no_evaluation_prefix_occurs_in_training(group, generators, batches):
    # Drawn without regard to splits, thousands of the evaluation prefixes would be met.
    options = dict(validation_sequences=8192, test_sequences=8192, evaluation_batch_size=8192, test_lengths=[9])
    task = WordProblem(group, generators, batch_size=2**16, train_length=10, validation_lengths=[12], **options)
    other_seed = WordProblem(group, generators, seed=1, validation_lengths=[10], **options)
    train = prefixes(task, "train", batches)
    assert train.sum() > 0.3 * min(train.size, batches * 2**16)
    for evaluated in (task, other_seed):
        validation, test = (prefixes(evaluated, split, 1) for split in ("validation", "test"))
        assert min(validation.sum(), test.sum()) > 5000
        assert not (validation & train).any()
        assert not (test & train).any()
        assert not (test & validation).any()


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_tokens_and_products_are_uniform(split):
    task = WordProblem(
        "A5", batch_size=30000, train_length=8, validation_lengths=[8], test_lengths=[8],
        validation_sequences=30000, test_sequences=30000, evaluation_batch_size=30000,
    )  # fmt: skip
    tokens, targets = task.batch(split, 0)
    columns = [tokens[:, 0], tokens[:, 3], tokens[:, 4], tokens[:, 7], targets[:, 3], targets[:, 7]]
    pairs = [tokens[:, 2] * 60 + tokens[:, 5], tokens[:, 6] * 60 + targets[:, 7]]
    for values, kinds in [(c, 60) for c in columns] + [(p, 3600) for p in pairs]:
        counts = torch.bincount(values, minlength=kinds).double()
        expected = len(values) / kinds
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        degrees = kinds - 1
        assert abs(chi_squared - degrees) < 5 * (2 * degrees) ** 0.5


def test_short_sequences_are_prefixes_of_owned_ones():
    one, many = (WordProblem("Z2", batch_size=64, train_length=length) for length in (1, 25))
    assert torch.equal(one.batch("train", 0)[0], many.batch("train", 0)[0][:, :1])


def test_few_generators_are_drawn_alike():
    task = WordProblem("A5", "few", batch_size=3000, train_length=16)
    drawn, counts = task.batch("train", 0)[0].unique(return_counts=True)
    assert drawn.tolist() == few_generators("A5").tolist()
    assert counts == pytest.approx(12000, rel=0.05)
    assert (task.vocab_size, task.prefix_length) == (60, 10)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 20), st.integers(1, 40), st.data())
def test_lengths_of_training_sequences(length, sequences, data):
    least = data.draw(st.none() | st.integers(1, length))
    pairs = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    full = WordProblem("A5", batch_size=sequences, train_length=length)
    task = WordProblem("A5", least_length=least, pairs=pairs, batch_size=sequences, train_length=length)
    scored = task.batch("train", 3)[1] != -100
    lengths = scored.sum(1)
    assert torch.equal(scored, torch.arange(length) < lengths[:, None])  # scored from the first position on
    for part, whole, filling in zip(task.batch("train", 3), full.batch("train", 3), (0, -100), strict=True):
        assert torch.equal(part, whole.where(scored, filling))
    short = round(pairs * sequences)
    assert (lengths[:short] == 2).all()
    assert ((lengths[short:] >= (least or length)) & (lengths[short:] <= length)).all()


def test_lengths_are_uniform():
    task = WordProblem("Z2", least_length=3, pairs=0.25, batch_size=28000, train_length=16)
    lengths = (task.batch("train", 0)[1] != -100).sum(1)
    counts = torch.bincount(lengths, minlength=17)
    assert counts[2] == 7000
    assert counts[3:] == pytest.approx(1500, rel=0.1)


def test_evaluation_sequences_have_full_length():
    task = WordProblem("A5", least_length=2, pairs=0.5, validation_sequences=8, test_sequences=8)
    for split in ("validation", "test"):
        for part, whole in zip(task.batch(split, 0), WordProblem("A5").batch(split, 0), strict=True):
            assert torch.equal(part, whole[:8])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(least_length=0), "least_length must be from 1 to train_length=16, got 0"),
        (dict(least_length=17), "least_length must be from 1 to train_length=16, got 17"),
        (dict(pairs=-0.1), "pairs must be a share from 0 to 1, got -0.1"),
        (dict(pairs=1.5), "pairs must be a share from 0 to 1, got 1.5"),
        (dict(pairs=float("nan")), "pairs must be a share from 0 to 1, got nan"),
        (dict(pairs=0.5, train_length=1), "pairs need a train_length of at least 2, got 1"),
    ],
)
def test_bad_lengths(options, message):
    with pytest.raises(ValueError, match=message):
        WordProblem("A5", **options)


@pytest.mark.parametrize(("group", "words"), [("a5", "example A5"), ("S9", "too large"), ("Z1", "one element")])
def test_bad_groups(group, words):
    with pytest.raises(ValueError, match=words):
        WordProblem(group)
