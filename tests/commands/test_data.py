"""data export, and training on what it wrote, from the command line."""

from pathlib import Path

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


def test_training_on_what_was_exported():
    files = []
    for split in ("train", "validation", "test"):
        assert export("--split", split, "--batches", "4", "--output", f"{split}.csv") == 0
        files += [f"--data.{split}_file", f"{split}.csv"]
    sizes = [f"--data.{name}={value}" for name, value in SIZES.items()]
    small = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.accelerator=cpu", "--model.width=8"]
    model = ["--model.mixer=LSTMMixer", "--model.labels=last", "--model.curriculum.end=6", "--data.vocab_size=6"]
    options = ["--model.curriculum=ProgressiveLengths", *model]
    assert main(["fit", "--data", "CsvFiles", *files, *sizes, *options, *small]) == 0
    assert main(["fit", "--config", "logs/train/lstm/run_0/config.yaml"]) == 0  # which names the files
    assert len(lines("logs/train/lstm/run_1/length_curve.csv")) == 3  # lengths 6 and, exported too, 50


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
