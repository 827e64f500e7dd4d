"""Formal languages: answers against naive checkers, the lengths, the distribution of expressions, disjoint splits."""

import re
from collections import Counter

import pytest
import torch

from fprnn_lightning.tasks import CycleNavigation, EvenPairs, ModularArithmetic, ModularArithmeticWithBrackets, Parity
from fprnn_lightning.tasks.formal_languages import SEPARATE, SHORTEST
from fprnn_lightning.tasks.splits import SPLIT_SPACE
from fprnn_lightning.training.metrics import LengthAccuracy

SYMBOLS = "01234+-*()=_"
CHECKERS = {  # the answer to a whole string
    Parity: lambda text: text.count("1") % 2,
    EvenPairs: lambda text: (text.count("01") + text.count("10")) % 2,
    CycleNavigation: lambda text: (text.count("2") - text.count("0")) % 5,
    ModularArithmetic: lambda text: eval(text.rstrip("+-*")) % 5,
}


def strings(batch):
    """The rows of a batch as text without padding, and their labels by position."""
    for tokens, targets in zip(*(part.tolist() for part in batch), strict=True):
        labels = {position: target for position, target in enumerate(targets) if target != -100}
        yield "".join(SYMBOLS[token] for token in tokens).rstrip("_"), labels


def expressions(task, split, batches):
    return [text for index in range(batches) for text, _ in strings(task.batch(split, index))]


@pytest.mark.parametrize("language", CHECKERS, ids=lambda language: language.__name__)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_every_prefix_is_labelled_with_its_answer(language, length):
    task = language(batch_size=20, train_length=length)
    for text, labels in strings(task.batch("train", 3)):
        assert labels == {t: CHECKERS[language](text[: t + 1]) for t in range(length)}


@pytest.mark.parametrize(
    ("language", "k", "vocabulary", "classes"),
    [(Parity, 20, 2, 2), (EvenPairs, 20, 2, 2), (CycleNavigation, 13, 5, 5), (ModularArithmetic, 11, 12, 5)],
)
def test_what_belongs_to_a_split_and_how_many_answers_there_are(language, k, vocabulary, classes):
    task = language(train_length=k, batch_size=2**17, validation_sequences=4096, validation_lengths=[k + 5])
    assert (task.prefix_length, task.vocab_size, task.chance) == (k, vocabulary, 1 / classes)
    tokens, targets = task.batch("train", 0)
    assert set(targets[:, -1].tolist()) == set(range(classes))
    train = set(map(tuple, tokens.tolist()))
    validation = {tuple(row[:k]) for batch, _ in task.val_dataloader() for row in batch.tolist()}
    assert len(train) > 1e5
    assert len(validation) > 3800
    assert not train & validation
    first = torch.bincount(tokens[:, 0]).double() / len(tokens)
    assert first == pytest.approx(first.mean().item(), abs=0.01)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_bracketed_expressions_have_their_value_at_the_end(split):
    task = ModularArithmeticWithBrackets(batch_size=64)
    for text, labels in strings(task.batch(split, 0)):
        assert text.index("=") == len(text) - 1
        assert labels == {len(text) - 1: eval(text[:-1]) % 5}


def test_lengths_are_uniform_in_training_and_take_turns_in_evaluation():
    task = ModularArithmeticWithBrackets(batch_size=7600, train_length=40, test_lengths=[40, 64], test_sequences=96)
    counts = Counter(map(len, expressions(task, "train", 1)))
    assert sorted(counts) == list(range(SHORTEST, 41))
    assert all(abs(count - 200) < 5 * 200**0.5 for count in counts.values())
    metric = LengthAccuracy(task.test_lengths)
    for _, targets in task.test_dataloader():
        metric.update(targets.clamp(min=0), targets)
    values = {name: torch.stack(value).tolist() for name, value in metric.compute().items()}
    assert values["sequences"] == pytest.approx([32, 32, 32], abs=2)
    assert sum(values["sequences"]) == 96
    assert values["token_accuracy"] == values["last_token_accuracy"] == values["sequence_accuracy"] == [1, 1, 1]


def test_expressions_are_drawn_as_published():
    """Short ones are d, -d, (d), (-d); else the outer operator is uniform in kind and in place."""
    task = ModularArithmeticWithBrackets(batch_size=2**14, train_length=14)
    texts = [text[:-1] for text in expressions(task, "train", 1)]
    assert {re.sub(r"\d", "d", text) for text in texts if len(text) < 5} == {"-d", "(d)", "(-d)"}
    outer = Counter()
    longest = [text for text in texts if len(text) == 13]
    for text in longest:
        depths = [text[: place + 1].count("(") - text[: place + 1].count(")") for place in range(len(text))]
        (place,) = (  # the minus of a negative digit follows a bracket or an operator
            p for p, symbol in enumerate(text) if symbol in "+-*" and depths[p] == 1 and text[p - 1] not in "(+-*"
        )
        outer[text[place], place] += 1
    assert set(outer) == {(operator, place) for operator in "+-*" for place in range(2, 11)}
    expected = len(longest) / len(outer)
    assert sum((count - expected) ** 2 / expected for count in outer.values()) < 26 + 5 * (2 * 26) ** 0.5


def test_no_long_expression_occurs_in_two_splits():
    options = dict(validation_lengths=[SEPARATE], validation_sequences=2048)
    task = ModularArithmeticWithBrackets(batch_size=2**15, train_length=SEPARATE, **options)
    train = {text for text in expressions(task, "train", 4) if len(text) == SEPARATE}
    validation = {text for batch in task.val_dataloader() for text, _ in strings(batch)}
    assert min(len(train), len(validation)) > 1500
    assert not train & validation


def test_there_are_enough_expressions_to_choose_from():
    counts = [0, 5, 5, 5, 5]
    while len(counts) < SEPARATE:  # the last token is =
        counts.append(3 * sum(counts[left] * counts[len(counts) - 3 - left] for left in range(1, len(counts) - 3)))
    assert counts[-1] >= SPLIT_SPACE > counts[-2]


@pytest.mark.parametrize("options", [dict(train_length=2), dict(validation_lengths=[40, 2]), dict(test_lengths=[2])])
def test_too_short_for_an_expression(options):
    with pytest.raises(ValueError, match="must be at least 3 tokens, got 2"):
        ModularArithmeticWithBrackets(**options)
