"""Copying and look-up: rows read as text and answered by hand, packing, lengths, splits, distributions, errors."""

import re
from collections import Counter

import pytest
import torch

from fprnn_lightning.tasks import Copying, DuplicateCopying, PrefixLookup, SelectiveCopying, SuffixLookup
from fprnn_lightning.tasks.base import BLOCK
from fprnn_lightning.training import AnswerAccuracy

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TASKS = [Copying, DuplicateCopying, PrefixLookup, SuffixLookup, SelectiveCopying]
any_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)


def following(key, string, letters):
    (place,) = (p for p in range(len(string)) if string[p : p + len(key)] == key)
    return string[place + len(key) :][:letters]


PROMPTS = {  # what a prompt looks like, and the answer to its parts
    Copying: (r"\$([a-z]+)\|", lambda task, string: string[: task.answer_length]),
    DuplicateCopying: (r"\$([a-z]+)\|", lambda task, string: string),
    PrefixLookup: (r"\$([a-z]+)\|([a-z]+)\|", lambda task, key, string: following(key, string, task.answer_length)),
    SuffixLookup: (r"\$([a-z]+)\|([a-z]{3})", lambda task, string, key: following(key, string, task.answer_length)),
    SelectiveCopying: (r"\$([a-z*]+)\|", lambda task, string: string.replace("*", "")),
}


def written(task, tokens):
    symbols = LETTERS[: task.alphabet] + "$|.*"
    return "".join("_" if token == -100 else symbols[token] for token in tokens)


def rows(task, split, index=0):
    """Each row as text, and what is to be said at each position, _ for nothing."""
    for row in zip(*(part.tolist() for part in task.batch(split, index)), strict=True):
        yield tuple(written(task, tokens) for tokens in row)


def examples(task, row):
    """The examples of a row, as far as their prompts are complete: place, prompt, string, answer."""
    pattern, answer = PROMPTS[type(task)]
    place = 0
    while found := re.compile(pattern).match(row, place):
        example = place, found[0], max(found.groups(), key=len), answer(task, *found.groups())
        yield example
        place = found.end() + len(example[-1]) + 1


def strings(task, split, batches=1):
    return [string for i in range(batches) for row, _ in rows(task, split, i) for *_, string, _ in examples(task, row)]


@any_task
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(alphabet=13, shortest=10, longest=21, train_length=131),
        dict(shortest=9, longest=9, train_length=23),
    ],
)
def test_a_training_row_is_full_of_examples_and_what_follows_a_prompt_is_said(task, options):
    task = task(batch_size=60, **options)
    lengths = set()
    for row, said in rows(task, "train", 3):
        assert len(row) == task.train_length
        expected, end = ["_"] * len(row), 0
        for place, prompt, string, answer in examples(task, row):
            example = f"{prompt}{answer}."
            end = place + len(example)
            assert row[place:end] == example[: len(row) - place]
            if end <= len(row) + 1:  # the end mark is said, and need not be read
                expected[place + len(prompt) - 1 : end - 1] = f"{answer}."
                lengths.add(len(string))
        assert said == "".join(expected)
        assert "." in said
        assert end >= len(row) or row[end] == "$"
    assert min(lengths) == task.shortest
    assert task.longest - 3 <= max(lengths) <= task.longest


@any_task
@pytest.mark.parametrize("split", ["validation", "test"])
def test_an_evaluation_row_is_one_example_of_which_the_letters_are_said(task, split):
    task = task(validation_lengths=[12, 37], test_lengths=[9, 64], evaluation_batch_size=BLOCK)
    for row, said in rows(task, split):
        ((_, prompt, string, answer),) = examples(task, row)
        assert row.rstrip("*") in (f"{prompt}{answer}."[: len(row)], f"{prompt}{answer}."[:-2])
        assert said == ("_" * (len(prompt) - 1) + answer).ljust(len(row), "_")
        assert len(string) in (task.validation_lengths if split == "validation" else task.test_lengths)
        assert len(prompt) == len(string) + task.prompt_overhead


@any_task
def test_every_length_has_a_thousand_strings_by_default_and_is_measured_on_them_alone(task):
    task = task()
    for loader, lengths in ((task.val_dataloader(), [25, 50]), (task.test_dataloader(), list(range(10, 101, 10)))):
        metric, wrong = (AnswerAccuracy(lengths, task.prompt_overhead, task.chance) for _ in range(2))
        for _, targets in loader:
            metric.update(targets.clamp(min=0), targets)
            wrong.update(torch.zeros_like(targets), targets)
        results = {name: torch.stack(values).tolist() for name, values in metric.compute().items()}
        assert min(results.pop("sequences")) >= 1000
        assert results == {name: [1.0] * len(lengths) for name in results}
        assert torch.stack(wrong.compute()["token_accuracy"]).tolist() == pytest.approx(
            [task.chance] * len(lengths), abs=0.02
        )


@any_task
def test_no_evaluation_string_occurs_in_training(task):
    task = task(shortest=8, longest=8, train_length=512, validation_lengths=[8], alphabet=26)
    train, validation = (strings(task, split, 2) for split in ("train", "validation"))
    if task.name == "selective_copying":
        train, validation = ([string.replace("*", "") for string in part] for part in (train, validation))
    assert min(len(train), len(validation)) > 1000
    assert not {string[:5] for string in train} & {string[:5] for string in validation}


def test_what_a_split_goes_by():
    for alphabet, k in ((2, 20), (26, 5), (1024, 2)):
        task = Copying(alphabet=alphabet, shortest=k, longest=k, batch_size=2**12, train_length=2 * k + 2)
        assert task.prefix_length == k
        assert task.vocab_size == alphabet + 4
        letters = torch.bincount(task.batch("train", 0)[0][:, 1]) / 2**12  # the first of each string
        assert letters == pytest.approx(1 / alphabet, abs=0.05)


def test_lengths_are_uniform_in_training():
    task = Copying(shortest=3, longest=12, train_length=256, batch_size=1024)
    counts = Counter(len(next(examples(task, row))[2]) for row, _ in rows(task, "train"))  # the first of each row
    assert sorted(counts) == list(range(3, 13))
    assert all(abs(count - 102.4) < 5 * 102.4**0.5 for count in counts.values())


@pytest.mark.parametrize("lookup", [PrefixLookup, SuffixLookup])
def test_every_place_of_a_string_is_as_likely_to_be_looked_up(lookup):
    task = lookup(shortest=14, longest=14, train_length=256, batch_size=256)
    places = Counter()
    for row, _ in rows(task, "train"):
        for _, prompt, string, _ in examples(task, row):
            key = min(re.findall("[a-z]+", prompt), key=len)
            places[string.index(key)] += 1
    expected = places.total() / 10
    assert sorted(places) == list(range(10))
    assert sum((count - expected) ** 2 / expected for count in places.values()) < 9 + 5 * 18**0.5


@pytest.mark.parametrize(("alphabet", "ngram"), [(50, 1), (8, 2), (4, 3), (2, 6)])
def test_an_ngram_occurs_once_even_in_the_smallest_alphabet(alphabet, ngram):
    lengths = dict(shortest=8, longest=50, validation_lengths=[50], test_lengths=[50])
    task = PrefixLookup(ngram, alphabet=alphabet, test_sequences=200, **lengths)
    for tokens, _ in task.test_dataloader():
        for row in tokens.tolist():
            key, string = row[1 : 1 + ngram], row[2 + ngram : 52 + ngram]
            assert sum(string[place : place + ngram] == key for place in range(51 - ngram)) == 1
            assert max(key + string) < alphabet


def test_a_duplicate_is_where_it_is_said_to_be():
    task = DuplicateCopying(ngram=4, shortest=9, longest=30)
    for string in strings(task, "train"):
        assert any(string[p : p + 4] in string[p + 4 :] for p in range(len(string) - 7))
    places = Counter(  # others are equal by accident
        (string.index(key), string.rindex(key))
        for string in strings(DuplicateCopying(ngram=4, shortest=11, longest=11, batch_size=256), "train")
        for key in {string[p : p + 4] for p in range(8)}
        if string.count(key) == 2
    )
    assert {pair for pair, count in places.items() if count > 50} == {(p, q) for q in (5, 6, 7) for p in range(q - 3)}


def test_letters_are_scattered_evenly():
    task = SelectiveCopying(answer_length=3, shortest=12, longest=12, batch_size=512)
    found = strings(task, "train")
    assert {12 - string.count("*") for string in found} == {3}
    counts = [sum(string[place] != "*" for string in found) for place in range(12)]
    expected = len(found) / 4
    assert all(abs(count - expected) < 5 * expected**0.5 for count in counts)


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Copying, dict(alphabet=1), "alphabet must be at least 2 letters, got 1"),
        (Copying, dict(shortest=0), "shortest must be from 1 to longest=50, got 0"),
        (Copying, dict(shortest=51), "shortest must be from 1 to longest=50, got 51"),
        (Copying, dict(answer_length=0), "answer_length must be at least 1 or null, got 0"),
        (Copying, dict(train_length=101), "train_length must be at least 102 tokens .* longest=50, got 101"),
        (DuplicateCopying, dict(ngram=0), "ngram must be at least 1, got 0"),
        (DuplicateCopying, dict(shortest=7), "shortest must be at least 8 .* got 7"),
        (DuplicateCopying, dict(ngram=6, shortest=12, test_lengths=[11]), "test_lengths must be at least 12 .* got 11"),
        (PrefixLookup, dict(ngram=0), "ngram must be at least 1, got 0"),
        (PrefixLookup, dict(answer_length=0), "answer_length must be at least 1, got 0"),
        (PrefixLookup, dict(shortest=4), "shortest must be at least 5 .* got 4"),
        (PrefixLookup, dict(train_length=57), "train_length must be at least 58 tokens .* longest=50, got 57"),
        (SuffixLookup, dict(validation_lengths=[4]), "validation_lengths must be at least 5 .* got 4"),
        (SuffixLookup, dict(train_length=56), "train_length must be at least 57 tokens .* longest=50, got 56"),
        (SuffixLookup, dict(ngram=1), "alphabet=26 is too small .* ngram=1 letters .* string of 100"),
        (SuffixLookup, dict(alphabet=4), "alphabet=4 is too small .* power of ngram must be at least 100"),
        (SelectiveCopying, dict(answer_length=0), "answer_length must be at least 1, got 0"),
        (SelectiveCopying, dict(answer_length=11), "shortest must be at least 11 .* got 10"),
    ],
)
def test_bad_options_are_answered_in_one_sentence(task, options, message):
    with pytest.raises(ValueError, match=message) as error:
        task(**options)
    assert "\n" not in str(error.value)


@any_task
def test_the_shortest_context_that_is_allowed(task):
    with pytest.raises(ValueError, match="must be at least") as error:
        task(train_length=1)
    shortest = int(re.search(r"at least (\d+) tokens", str(error.value))[1])
    task = task(train_length=shortest, shortest=50)
    for row, said in rows(task, "train"):
        ((_, prompt, _, answer),) = examples(task, row)
        assert row == prompt + answer
        assert said.lstrip("_") == f"{answer}."
