"""The word problem: labels against a naive checker, disjoint splits, uniform tokens, names and errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fprnn_lightning.tasks import WordProblem
from fprnn_lightning.tasks.groups import make_group
from fprnn_lightning.tasks.splits import OWNERS, owner_of


def prefixes(task, split, batches):
    """Which of all |G|^k prefixes occur: (|G|^k,) bool."""
    k = task.prefix_length
    met = np.zeros(task.vocab_size**k, bool)
    for index in range(batches):
        met[task.batch(split, index)[0][:, :k].numpy() @ task.vocab_size ** np.arange(k)] = True
    return met


@settings(max_examples=25, deadline=None)
@given(
    group=st.sampled_from(["Z2", "Z7", "S3", "S4", "A4", "A5", "S5", "A4xZ2", "S3xZ2xZ2", "Z2000"]),
    length=st.integers(1, 40),
    sequences=st.integers(1, 9),
    index=st.integers(0, 2**40),
    split=st.sampled_from(["train", "validation"]),
)
def test_targets_are_running_products(group, length, sequences, index, split):
    task = WordProblem(group, batch_size=sequences, train_length=length, validation_lengths=[length])
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


@pytest.mark.parametrize(("group", "batches"), [("S3", 16), ("A5", 8)])
def test_no_evaluation_prefix_occurs_in_training(group, batches):
    # Drawn without regard to splits, thousands of the evaluation prefixes would be met.
    options = dict(validation_sequences=8192, test_sequences=8192, evaluation_batch_size=8192, test_lengths=[9])
    task = WordProblem(group, batch_size=2**16, train_length=9, validation_lengths=[12], **options)
    other_seed = WordProblem(group, seed=1, validation_lengths=[8], **options)
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


@pytest.mark.parametrize(("group", "words"), [("a5", "example A5"), ("S9", "too large"), ("Z1", "one element")])
def test_bad_groups(group, words):
    with pytest.raises(ValueError, match=words):
        WordProblem(group)
