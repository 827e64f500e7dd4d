"""data export, data import, and training on what they wrote, from the command line."""

import os
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest
import yaml

from fprnn_lightning.cli import main

SIZES = {"batch_size": 4, "train_length": 6, "validation_lengths": [6], "test_lengths": [6]}
TASK = {"data": {"class_path": "WordProblem", "init_args": {"group": "S3", "validation_sequences": 5, **SIZES}}}


@pytest.fixture(autouse=True)
def task(tmp_path, monkeypatch):
    """A folder to work in, with the configuration of a small task."""
    monkeypatch.chdir(tmp_path)
    Path("task.yaml").write_text(yaml.safe_dump(TASK))


def export(*options):
    return main(["data", "export", "--config", "task.yaml", *options])


def lines(path):
    return Path(path).read_text().splitlines()


def test_splits_are_written(capsys):
    assert export("--split", "validation", "--output", "validation.csv") == 0
    assert export("--split", "train", "--batches", "3", "--output", "train.csv", "--data.seed", "8") == 0
    validation, train = lines("validation.csv"), lines("train.csv")
    assert (len(validation), len(train)) == (1 + 5, 1 + 12)
    assert validation[0] == train[0] == "seed,input,target"
    assert {line.split(",")[0] for line in train[1:]} == {"8"}
    assert all(len(line.split(",")[1].split()) == 6 for line in validation[1:] + train[1:])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["task/copying.yaml", "a5_dense.yaml"])
def test_configurations_of_runs_are_exported_from(name):
    config = Path(__file__).parents[2] / "configs" / name
    assert main(["data", "export", "--config", str(config), "--data.test_sequences", "3", "--output", "test.csv"]) == 0
    assert len(lines("test.csv")) == 1 + 3


def test_training_on_what_was_exported():
    files = []
    Path("exported").mkdir()
    for split in ("train", "validation", "test"):
        assert export("--split", split, "--batches", "4", "--output", f"exported/{split}.csv") == 0
        files += [f"--data.{split}_file", f"exported/{split}.csv"]
    sizes = [f"--data.{name}={value}" for name, value in SIZES.items()]
    small = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.accelerator=cpu", "--model.width=8"]
    model = ["--model.mixer=LSTMMixer", "--model.labels=last", "--model.curriculum.end=6", "--data.vocab_size=6"]
    options = ["--model.curriculum=ProgressiveLengths", *model]
    assert main(["fit", "--data", "CsvFiles", *files, *sizes, *options, *small]) == 0
    assert main(["fit", "--config", "logs/exported/lstm/run_0/config.yaml"]) == 0  # which names the files
    assert len(lines("logs/exported/lstm/run_1/length_curve.csv")) == 3  # lengths 6 and, exported too, 50


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--output", "absent/a.csv"], "output: cannot write absent/a.csv, No such file or directory"),
        (["--output", "task.yaml/a.csv"], "output: cannot write task.yaml/a.csv, Not a directory"),
        (["--output", "."], "output: cannot write ., "),
        (["--output", "a.csv", "--split", "train", "--batches", "0"], "batches must be at least 1, got 0."),
        (["--output", "a.csv", "--split", "tets"], "split: expected one of 'train', 'validation', 'test', got tets"),
        (["--output", "a.csv", "--data.group", "B5"], "Unknown group 'B5'"),
        (["--output", "a.csv", "--data.pairs", "2"], "pairs must be a share from 0 to 1, got 2.0."),
        ([], "missing output"),
    ],
)
def test_mistakes_are_told_in_one_sentence_and_leave_nothing(capsys, options, sentence):
    assert export(*options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")
    assert [path.name for path in Path().iterdir()] == ["task.yaml"]


def test_a_bad_file_is_told_in_one_sentence(capsys):
    Path("bad.csv").write_text("seed,input,target\n0,1 2,1 2\n0,1 9,1 2\n")
    files = [f"--data.{split}_file=bad.csv" for split in ("train", "validation", "test")]
    options = ["--data", "CsvFiles", *files, "--data.vocab_size=6", "--model.mixer", "LSTMMixer"]
    assert main(["fit", *options]) == 2
    assert capsys.readouterr().err == "error: bad.csv, line 3: input has 9, beyond 0 to 5 (vocab_size).\n"
    assert not Path("logs").exists()


def published(path, sequences, length, seed=1):
    """A file as the public generator writes it, of the sums mod 7 of random numbers; one row occurs twice."""
    random = Random(seed)
    rows = [[random.randrange(7) for _ in range(length)] for _ in range(sequences - 1)]
    rows.append(rows[0])
    sums = [[total % 7 for total in accumulate(row)] for row in rows]
    cells = [
        f"{seed},{' '.join(map(str, row))},{' '.join(map(str, total))}" for row, total in zip(rows, sums, strict=True)
    ]
    Path(path).write_text("\n".join(["seed,input,target", *cells]) + "\n")
    return ["0" + cell.removeprefix(str(seed)) for cell in cells]


def imported(*options):
    return main(["data", "import", "--vocab_size", "7", "--output", "z7", *options])


def parts(folder="z7"):
    texts = {name: lines(f"{folder}/{name}.csv") for name in ("train", "validation", "test")}
    assert {text[0] for text in texts.values()} == {"seed,input,target"}
    assert len(list(Path(folder).iterdir())) == 3
    return {name: text[1:] for name, text in texts.items()}


def test_import_divides_a_file_without_sharing_a_sequence(capsys):
    rows = published("Z7=8.csv", 1000, 8)
    assert imported("--input", "Z7=8.csv", "--validation_share", "0.2") == 0
    made = parts()
    assert sorted(row for text in made.values() for row in text) == sorted(rows)
    assert not set(made["train"]) & {*made["validation"], *made["test"]} | set(made["validation"]) & set(made["test"])
    assert all(text == [row for row in rows if row in set(text)] for text in made.values())  # in order
    assert 640 < len(made["train"]) < 760
    assert 160 < len(made["validation"]) < 240
    counts = ", ".join(f"{len(text)} sequences in {name}.csv" for name, text in made.items())
    assert capsys.readouterr().out == f"z7: {counts}\n"


def test_import_of_a_test_file_and_of_several():
    short, long, test = published("2.csv", 50, 6, seed=2), published("8.csv", 300, 8), published("50.csv", 40, 50)
    assert imported("--input", "[2.csv, 8.csv]", "--test_input", "50.csv") == 0
    made = parts()
    assert made["test"] == test
    assert sorted(made["train"] + made["validation"]) == sorted(short + long)
    assert imported("--input", "8.csv", "--output", "again") == 0
    assert set(parts("again")["validation"]) <= set(made["validation"])  # whatever else is imported


def test_import_writes_one_form():
    rows = [f"{i} 3,1\r\n" for i in range(7)]
    Path("a.csv").write_bytes(b"\xef\xbb\xbfinput,target\r\n" + "".join(rows).encode() * 9)
    assert imported("--input", "a.csv", "--validation_share", "0.3", "--test_share", "0.3") == 0
    assert {row for text in parts().values() for row in text} == {f"0,{i} 3,-100 1" for i in range(7)}


def test_training_on_what_was_imported():
    published("Z7=16.csv", 300, 16)
    assert imported("--input", "Z7=16.csv") == 0
    files = [f"--data.{split}_file=z7/{split}.csv" for split in ("train", "validation", "test")]
    small = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.accelerator=cpu", "--model.width=8"]
    config = Path(__file__).parents[2] / "configs" / "task" / "csv_files.yaml"
    options = ["--data.vocab_size=7", "--data.batch_size=4", "--model.mixer=LSTMMixer"]
    assert main(["fit", "--config", str(config), *files, *options, *small]) == 0
    assert len(lines("logs/z7/lstm/run_0/length_curve.csv")) == 2  # the file has no sequences longer than 16


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--input", "absent.csv"], "absent.csv: cannot be read, No such file or directory."),
        (["--input", "bad.csv"], "bad.csv, line 3: input has 9, beyond 0 to 6 (vocab_size)."),
        (["--input", "[good.csv, bad.csv]"], "bad.csv, line 3: input has 9"),
        (["--input", "unlabelled.csv"], "unlabelled.csv, line 2: target has no label but -100."),
        (
            ["--input", "good.csv", "--test_input", "good.csv"],
            "good.csv, line 2: this sequence is in good.csv too, line",
        ),
        (["--input", "good.csv", "--validation_share", "0"], "No sequence goes into validation.csv, of 90: its share"),
        (
            ["--input", "good.csv", "--validation_share", "-1"],
            "validation_share and test_share must be shares, at most",
        ),
        (["--input", "good.csv", "--test_share", "0.95"], "validation_share and test_share must be shares, at most"),
        (["--input", "good.csv", "--vocab_size", "0"], "vocab_size must be at least 1, got 0."),
        (["--input", "[]"], "input must name at least one file."),
        (["--input", "good.csv", "--output", "task.yaml"], "output: task.yaml exists already."),
        (["--input", "good.csv", "--output", "absent/z7"], "output: cannot make absent/z7, No such file or directory"),
        ([], "missing input"),
    ],
)
def test_mistakes_of_import_are_told_in_one_sentence_and_leave_nothing(capsys, options, sentence):
    published("good.csv", 90, 5)
    Path("bad.csv").write_text("seed,input,target\n0,1 2,1 2\n0,1 9,1 2\n")
    Path("unlabelled.csv").write_text("seed,input,target\n0,1 2,-100 -100\n")
    before = sorted(Path().iterdir())
    assert imported(*options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {sentence}")
    assert sorted(Path().iterdir()) == before


def test_an_interrupted_import_leaves_nothing(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    published("good.csv", 90, 5)
    before = sorted(Path().iterdir())
    monkeypatch.setattr(os, "replace", interrupted)
    assert imported("--input", "good.csv") == 130
    assert sorted(Path().iterdir()) == before
