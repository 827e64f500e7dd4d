"""The length-generalisation curve: table, files and TensorBoard, all from the numbers of one test."""

import csv

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fprnn_lightning.callbacks import LengthCurve, length_curve
from fprnn_lightning.tasks import Copying

ACCURACIES = ["token_accuracy", "last_token_accuracy", "sequence_accuracy", "scaled_accuracy"]


def test_table_csv_png_and_tensorboard(small_learner, small_task, small_trainer, tmp_path, capsys):
    logger = TensorBoardLogger(tmp_path, name="", version="run_0")
    folder = tmp_path / "run_0"
    trainer = small_trainer(callbacks=[LengthCurve()], logger=logger, default_root_dir=folder)
    trainer.test(small_learner(chance=0.5), small_task(), verbose=False)
    with open(folder / "length_curve.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["length", *ACCURACIES, "sequences"]
    assert [(row[0], row[5]) for row in rows] == [("4", "24"), ("8", "24"), ("50", "24")]
    for row in rows:
        for name, value in zip(ACCURACIES, row[1:5], strict=True):
            assert float(value) == pytest.approx(trainer.callback_metrics[f"test/{name}_{row[0]}"].item(), abs=1e-6)

    printed = capsys.readouterr().out
    assert all(f"{float(row[1]):.4f}" in printed for row in rows)

    with Image.open(folder / "length_curve.png") as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(2**24)) > 10, "something is drawn"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], "no temporary files stay behind"

    logger.finalize("success")
    events = EventAccumulator(str(folder)).Reload()
    assert events.Tags()["images"] == ["length_curve"]
    for column, name in enumerate(ACCURACIES, 1):
        points = [(event.step, event.value) for event in events.Scalars(f"length_curve/{name}")]
        assert points == [(int(row[0]), pytest.approx(float(row[column]), abs=1e-6)) for row in rows]


def test_the_files_go_to_the_root_whatever_logs(small_learner, small_task, small_trainer, tmp_path):
    logger = CSVLogger(tmp_path / "elsewhere")
    small_trainer(callbacks=[LengthCurve()], logger=logger).test(small_learner(), small_task(), verbose=False)
    assert {"length_curve.csv", "length_curve.png"} <= {path.name for path in tmp_path.iterdir()}


def test_a_failed_write_leaves_the_old_file(small_learner, small_task, small_trainer, tmp_path, monkeypatch):
    def broken(rows, path):
        path.write_text("length,tok")
        raise OSError("disk full")

    (tmp_path / "length_curve.csv").write_text("old")
    monkeypatch.setattr("fprnn_lightning.callbacks.length_curve.write_csv", broken)
    with pytest.raises(OSError, match="disk full"):
        small_trainer(callbacks=[LengthCurve()]).test(small_learner(), small_task(), verbose=False)
    assert (tmp_path / "length_curve.csv").read_text() == "old"


def test_where_there_are_prompts(small_learner, small_trainer, tmp_path, monkeypatch):
    """Generated accuracies are columns, and what is shaded are lengths of strings."""
    drawn = []
    draw = length_curve.draw
    monkeypatch.setattr(length_curve, "draw", lambda *args, **title: drawn.append(args) or draw(*args, **title))
    lengths = {"validation_lengths": [3], "test_lengths": [3, 50]}
    task = Copying(alphabet=3, shortest=1, longest=3, train_length=8, test_sequences=6, **lengths)
    learner = small_learner(vocab_size=task.vocab_size, prompt_overhead=task.prompt_overhead, **lengths)
    trainer = small_trainer(callbacks=[LengthCurve()])
    trainer.test(learner, task, verbose=False)
    with (tmp_path / "length_curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    generated = [f"generated_{name}" for name in ("token_accuracy", "sequence_accuracy")]
    assert list(rows[0]) == ["length", *ACCURACIES, *generated, "sequences"]
    for row in rows:
        for name in generated:
            logged = trainer.callback_metrics[f"test/{name}_{row['length']}"].item()
            assert float(row[name]) == pytest.approx(logged, abs=1e-6)
    assert [row["sequences"] for row in rows] == ["3", "3"]
    assert [length for _, length in drawn] == [3]
