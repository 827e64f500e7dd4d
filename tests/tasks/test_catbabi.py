"""catbAbI: small files of the published format, read back by a naive reader; what is wrong is told with its line."""

from pathlib import Path

import pytest

from fprnn_lightning.cli import main
from fprnn_lightning.tasks.catbabi import CatBabi
from fprnn_lightning.training import LengthAccuracy

PEOPLE, PLACES = ("mary", "john", "sandra", "daniel"), ("kitchen", "garden", "office", "n,w")
SIZES = dict(batch_size=64, train_length=20, validation_lengths=[20], test_lengths=[20, 40])
SIZES |= dict(validation_sequences=18, test_sequences=18)


def story(number):
    """Where somebody went, asked for once or twice."""
    who, where = PEOPLE[number % 4], PLACES[number // 4 % 4]
    words = f"{who} took thing{number % 5} to the {where} . where is {who} ? {where}"
    return f"{number % 20 + 1}\t{words}" + f" where is thing{number % 5} ? {where}" * (number % 2)


def write(folder, prefix="en-valid-10k", **texts):
    folder.mkdir(exist_ok=True)
    for index, split in enumerate(("train", "valid", "test")):
        text = "".join(f"{story(number)}\n" for number in range(12 * index, 12 * index + 12))
        (folder / f"{prefix}_{split}.txt").write_text(texts.get(split, text))
    return folder


def words(task, folder, batch):
    """The rows as words, and the word that each target stands for."""
    lines = "".join(path.read_text() for path in folder.glob("*.txt")).splitlines()
    names = sorted({"<eos>", *(word for line in lines for word in line.split("\t")[1].split())})
    assert task.vocab_size == len(names)
    for tokens, targets in zip(*(part.tolist() for part in batch), strict=True):
        yield [names[token] for token in tokens], {t: names[label] for t, label in enumerate(targets) if label != -100}


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_contexts_end_with_a_question_and_score_answers_of_whole_stories(tmp_path, split):
    folder = write(tmp_path / "files")
    task = CatBabi(folder, **SIZES)
    lines = (folder / f"en-valid-10k_{split}.txt").read_text().splitlines()
    stream = 2 * " ".join(f"<eos> {line.partition(chr(9))[2]}" for line in lines).split()
    rows = list(words(task, folder, task.batch(split.replace("valid", "validation"), 0)))
    for row, answers in rows:
        place = next(i for i in range(len(stream)) if stream[i : i + len(row)] == row)
        begun = row.index("<eos>")
        asked = [t for t, word in enumerate(row) if word == "?" and t > begun]
        assert answers == {t: stream[place + t + 1] for t in asked}
        assert asked[-1] == len(row) - 1
        assert set(answers.values()) <= set(PLACES)
    assert len({tuple(row) for row, _ in rows}) == 18  # each question once, at least


def test_questions_too_far_from_the_beginning_of_their_story_are_not_asked(tmp_path):
    folder = write(tmp_path / "files")
    task = CatBabi(folder, **SIZES | dict(train_length=15))  # second questions are the 17th word
    rows = list(words(task, folder, task.batch("train", 0)))
    assert {row[-2] for row, _ in rows} == set(PEOPLE)
    assert len({tuple(row) for row, _ in rows}) == 12


def test_the_smaller_files(tmp_path):
    folder = write(tmp_path / "files", prefix="en-valid")
    assert CatBabi(folder, stories="1k", **SIZES).batch("train", 0)[0].shape == (64, 20)
    with pytest.raises(
        ValueError, match=r"lacks en-valid-10k_train.txt, en-valid-10k_valid.txt, en-valid-10k_test.txt"
    ):
        CatBabi(folder, **SIZES)


@pytest.mark.parametrize(
    ("texts", "options", "sentence"),
    [
        ({"train": ""}, {}, "en-valid-10k_train.txt: the file is empty."),
        ({"valid": "1\tis it ? yes\n\n"}, {}, "valid.txt, line 2: a number, a tab and a story are needed, not ''."),
        ({"test": "is it ? yes\n"}, {}, "test.txt, line 1: a number, a tab and a story are needed, not 'is it"),
        ({"test": "1\tmary went home .\n"}, {}, "test.txt, line 1: there is no question mark with an answer after it."),
        ({"test": "1\tis it ?\n"}, {}, "test.txt, line 1: there is no question mark with an answer after it."),
        (
            {},
            {"train_length": 11},
            "train_length must reach a question, 12 tokens, and stay below the .*train.txt, got 11.",
        ),
        (
            {},
            {"test_lengths": [400]},
            "test_lengths must reach a question, 12 tokens, and stay below the .*test.txt, got 400.",
        ),
    ],
)
def test_bad_files_and_lengths_are_answered_in_one_sentence(tmp_path, texts, options, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        CatBabi(write(tmp_path / "files", **texts), **SIZES | options)
    assert "\n" not in str(error.value)


def test_text_that_is_not_utf8(tmp_path):
    folder = write(tmp_path / "files")
    (folder / "en-valid-10k_test.txt").write_bytes(b"1\tis it ? \xff\n")
    with pytest.raises(ValueError, match=r"test.txt: byte 10 is not UTF-8"):
        CatBabi(folder, **SIZES)


def test_missing_files_are_told_with_where_they_come_from(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = Path(__file__).parents[2] / "configs" / "task" / "catbabi.yaml"
    assert main(["fit", "--config", str(config), "--model.mixer", "LSTMMixer"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: folder: data/catbAbI_v1.2 lacks en-valid-10k_train.txt")
    assert "download_and_preprocess.sh" in sentence


def test_every_context_counts_at_the_longest_length(tmp_path):
    accuracy = LengthAccuracy([20])
    tokens, targets = CatBabi(write(tmp_path / "files"), **SIZES).batch("validation", 0)
    accuracy.update(targets.where(targets != -100, tokens), targets)
    assert [value[0].item() for value in accuracy.compute().values()] == [1.0, 1.0, 1.0, 1.0, 18]
