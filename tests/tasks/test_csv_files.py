"""CSV files: what is written is read again, what is published is read, what is wrong is told with its line."""

import pytest
import torch

from fprnn_lightning.tasks import WordProblem
from fprnn_lightning.tasks.csv_files import CsvFiles, write_csv

HEADER = "seed,input,target\n"


@pytest.fixture
def make(tmp_path):
    """A task of files with these texts, three good ones by default."""

    def make(train=None, validation=None, test=None, **options):
        texts = {"train": train, "validation": validation, "test": test}
        files = {}
        for number, (name, text) in enumerate(texts.items()):
            good = HEADER + "".join(f"0,{i} 3 {number} 4,{i} {number} 1 2\n" for i in range(5))
            files[f"{name}_file"] = tmp_path / f"{name.title()}=4.csv"
            files[f"{name}_file"].write_bytes(
                text if isinstance(text, bytes) else (good if text is None else text).encode()
            )
        sizes = {"vocab_size": 5, "batch_size": 8, "train_length": 4, "validation_lengths": [2, 4], "test_lengths": [4]}
        return CsvFiles(**files | sizes | options)

    return make


def rows(batch):
    return [tuple(map(tuple, row)) for row in zip(*(part.tolist() for part in batch), strict=True)]


def test_what_is_written_is_read(tmp_path):
    source = WordProblem("S3", batch_size=1000, least_length=2, pairs=0.1, train_length=12)
    paths = [tmp_path / f"{name}.csv" for name in ("train", "validation", "test")]
    for index, path in enumerate(paths):
        tokens, targets = source.batch("train", index)
        keep = (targets != -100).sum(1) > 10  # longer ones, which do not occur twice
        write_csv(path, 7, [(tokens[keep], targets[keep]), (tokens[keep][:0], targets[keep][:0])])
    task = CsvFiles(*paths, vocab_size=6, train_length=12, validation_lengths=[12], test_lengths=[12], batch_size=500)
    for split, index in (("validation", 1), ("test", 2)):
        tokens, targets = source.batch("train", index)
        keep = (targets != -100).sum(1) > 10
        assert keep.sum() > 128  # blocks of evaluation sequences
        assert rows(task.batch(split, 0)) == rows((tokens[keep], targets[keep]))
    tokens, targets = source.batch("train", 0)
    assert set(rows(task.batch("train", 0))) <= set(rows((tokens, targets)))


def test_a_published_file(make):
    text = "seed,input,target\n5,1 2 3 4,1 3 0 4\n5,0 0 1 1,0 0 1 2\n"
    task = make(test=text)
    assert rows(task.batch("test", 0)) == [((1, 2, 3, 4), (1, 3, 0, 4)), ((0, 0, 1, 1), (0, 0, 1, 2))]
    assert (task.name, task.vocab_size, task.test_sequences, task.validation_sequences) == ("train=4", 5, 2, 5)
    assert (task.validation_lengths, task.test_lengths) == ([2, 4], [4])  # 50 is longer than what there is


@pytest.mark.parametrize(
    "text",
    [
        "length,input,target\n4,1 2 3 4,4\n",  # one label, of the last token
        "target,input\n-100 -100 -100 4,1 2 3 4\n",
        b"\xef\xbb\xbfseed,input,target\r\n\r\n0,1 2 3 4,4\r\n",
        'seed,input,target\n0,"1 2 3 4","4"',
    ],
)
def test_other_ways_to_write(make, text):
    assert rows(make(test=text).batch("test", 0)) == [((1, 2, 3, 4), (-100, -100, -100, 4))]


def test_shorter_sequences_are_filled_up(make):
    task = make(test=HEADER + "0,1 2,1 3\n0,4 4 4 4,1 1 1 1\n")
    assert rows(task.batch("test", 0))[0] == ((1, 2, 0, 0), (1, 3, -100, -100))


def test_training_draws_all_rows(make):
    task = make(batch_size=100, train_length=3)
    drawn = set(rows(task.batch("train", 0)))
    assert drawn == {((i, 3, 0), (i, 0, 1)) for i in range(5)}
    assert not torch.equal(task.batch("train", 0)[0], task.batch("train", 1)[0])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "Test=4.csv, line 1: the header must have the columns input and target, lacks input and target."),
        (b" ", "line 1: the header must have"),
        ("seed,input\n", "line 1: the header must have the columns input and target, lacks target."),
        (HEADER, "line 1: nothing but a header"),
        (HEADER + "0,1 2,1 2\n0,1 2\n", "line 3: 2 columns where the header has 3."),
        (HEADER + "0,1 2,1 2,9\n", "line 2: 4 columns where the header has 3."),
        (HEADER + "\n0,1 x,1 2\n", "line 3: input must be whole numbers separated by spaces, is '1 x'."),
        (HEADER + "0,1 2,1 2.5\n", "line 2: target must be whole numbers separated by spaces, is '1 2.5'."),
        (HEADER + "0,,1\n", "line 2: input is empty."),
        (HEADER + "0,1 2, \n", "line 2: target is empty."),
        (HEADER + "0,1 2,-100 -100\n", "line 2: target has no label but -100."),
        (HEADER + "0,1 2 3,1 2\n", "line 2: 2 labels in target for 3 tokens in input."),
        (HEADER + "0,1 5,1 2\n", r"line 2: input has 5, beyond 0 to 4 \(vocab_size\)."),
        (HEADER + "0,1 -100,1 2\n", r"line 2: input has -100, beyond 0 to 4"),
        (HEADER + "0,1 2,1 5\n", r"line 2: target has 5, beyond 0 to 4"),
        (HEADER + '0,1 2,"1 2\n', "line 2: unexpected end of data."),
        (HEADER.encode() + b"0,1 2,1 2\n0,\xff,1\n", "line 3: this is no text in UTF-8."),
        (HEADER + "0,4 4,1 1\n0,1 3 1 4,1 1 1 1\n", r"line 3: this sequence is in .*Validation=4.csv too, line 3."),
        (HEADER + "0,1 1 3,1 1 1\n", r"test_lengths are \[4, 50\], but the longest row of .*Test=4.csv has 3."),
    ],
)
def test_bad_files_are_answered_in_one_sentence(make, text, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        make(test=text)
    assert "\n" not in str(error.value)
    assert "Test=4.csv" in str(error.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(train_length=9), "train_length is 9, but the longest row of .*Train=4.csv has 4."),
        (dict(vocab_size=0), "vocab_size must be at least 1, got 0."),
        (
            dict(train=HEADER + "0,1 2 3,3\n0,1 2 3 4,4\n", train_length=3),
            r"line 3: no label within the first 3 tokens",
        ),
        (
            dict(validation=HEADER + "0,1 2 3,3\n0,1 2 3 4,4\n", validation_lengths=[2]),
            r"Validation=4.csv: no sequence has a label within the first 2 tokens \(validation_lengths\).",
        ),
        (
            dict(test=HEADER + "0,1 2 3 4,4\n0,4,4\n", test_lengths=[3], test_sequences=1),
            r"Test=4.csv: no sequence has a label within the first 3 tokens \(test_lengths\).",
        ),
        (
            dict(train=HEADER + "0,1 3 2 4,1 1 1 1\n"),
            r"Test=4.csv, line 3: this sequence is in .*Train=4.csv too, line 2",
        ),
    ],
)
def test_bad_options(make, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**options)


@pytest.mark.parametrize("name", ["absent.csv", "."])
def test_files_that_cannot_be_read(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be read, "):
        CsvFiles(*[tmp_path / name] * 3, vocab_size=5)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("as before")

    def batches():
        yield torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_csv(path, 0, batches())
    assert [file.name for file in tmp_path.iterdir()] == ["data.csv"]
    assert path.read_text() == "as before"


def test_what_is_not_scored_is_written_as_such(tmp_path):
    targets = torch.tensor([[-100, 2, -100, 0, -100], [-100] * 5])
    write_csv(tmp_path / "data.csv", 3, [(torch.arange(10).view(2, 5), targets)])
    assert (tmp_path / "data.csv").read_bytes() == b"seed,input,target\n3,0 1 2 3,-100 2 -100 0\n"
