"""Run folders: which there are, what they hold, and what is left of half-written ones."""

import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from fprnn_lightning.commands.runs import find_runs, flatten, nearest_length, read_run
from fprnn_lightning.figures import mixer_label

MakeRun = Callable[..., Path]
DENSE = {
    "class_path": "fprnn_lightning.mixers.dense.DenseMixer",
    "init_args": {"core": {"class_path": "cores.GatedDiagonal"}, "channel_mixer": {"class_path": "LowRank"}},
}


def test_runs_are_found_at_any_depth_once_and_in_the_order_of_their_numbers(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [make_run(tmp_path / "a5" / "lstm" / f"run_{n}") for n in (2, 10)] + [make_run(tmp_path / "s3" / "run_0")]
    for name in ("test_0", "validate_12", "predict_3"):
        shutil.copytree(runs[0], runs[1] / name)
    shutil.copytree(runs[0], tmp_path / ".hidden")
    (tmp_path / "a5" / "config.yaml").write_text("of a sweep, with runs below")
    (tmp_path / "nothing").mkdir()
    assert find_runs([tmp_path]) == runs
    assert find_runs([tmp_path, tmp_path / "a5", runs[0]]) == runs
    assert find_runs([runs[1]]) == [runs[1]]
    assert find_runs([tmp_path / "nothing"]) == []


def test_what_a_finished_run_says(tmp_path: Path, make_run: MakeRun) -> None:
    run = read_run(make_run(tmp_path / "a5" / "dense" / "run_0", seed=3, model__mixer=DENSE))
    assert run.warnings == []
    assert (run.task, run.label, run.seed) == ("a5", "dense GatedDiagonal LowRank", "3")
    assert (run.finished, run.status) == (True, "finished")
    assert (run.trained_length, run.steps, run.max_steps, run.minutes) == (16, 600, 600, 1.0)
    assert [row["length"] for row in run.curve] == [16, 50, 128]
    assert run.curve[1] == {"length": 50, "token_accuracy": 0.95, "sequence_accuracy": 0.95, "sequences": 64}
    assert run.parameters is None
    assert run.validated("token_accuracy", 16).values.tolist() == pytest.approx([0.5, 0.99, 1.0])
    assert run.validated("token_accuracy", 49).values.tolist() == pytest.approx([0.5, 0.99, 1.0])
    assert run.validated("token_accuracy", 50).values.tolist() == pytest.approx([0.25, 0.495, 0.5])
    assert len(run.validated("scaled_accuracy", 16).values) == 0


def test_an_unfinished_run(tmp_path: Path, make_run: MakeRun) -> None:
    run = read_run(make_run(tmp_path / "run_0", finished=False, validation={200: 0.5}))
    assert not run.finished
    assert run.status == f"unfinished, last written {datetime.fromtimestamp(1020):%Y-%m-%d %H:%M}"
    assert run.steps == 200
    assert run.curve == []


def test_settings_are_what_makes_a_run_but_for_its_seed(tmp_path: Path, make_run: MakeRun) -> None:
    one = read_run(make_run(tmp_path / "1"))
    other = read_run(
        make_run(tmp_path / "2", seed=1, trainer__default_root_dir="x", trainer__logger={"class_path": "a.B"})
    )
    assert one.settings == other.settings
    assert one.settings["model.mixer"] == "LSTMMixer"
    assert one.settings["model.curriculum.end"] == "16"
    stopped = [{"class_path": "callbacks.StopWhenSolved", "init_args": {"threshold": 0.5}}]
    third = read_run(make_run(tmp_path / "3", trainer__callbacks=stopped))
    assert third.settings.items() - one.settings.items() == {
        ("trainer.callbacks.0", "StopWhenSolved"),
        ("trainer.callbacks.0.threshold", "0.5"),
    }


def test_hparams_say_what_the_configuration_does_not(tmp_path: Path, make_run: MakeRun) -> None:
    hparams = {"task": "S5", "mixer": "dense", "core": "GatedDiagonal", "channel_mixer": "Householder", "seed": 7.0}
    folder = make_run(tmp_path / "run_0", hparams={**hparams, "length": 12.0, "parameters": 1234.0})
    assert read_run(folder).parameters == 1234
    assert read_run(folder).label == "lstm", "the configuration is what ran"
    (folder / "config.yaml").unlink()
    run = read_run(folder)
    assert run.warnings == ["config.yaml is missing"]
    assert (run.task, run.label, run.seed, run.trained_length) == ("s5", "dense GatedDiagonal Householder", "7", 12)


def test_without_both_the_folders_name_task_and_mixer(tmp_path: Path, make_run: MakeRun) -> None:
    folder = make_run(tmp_path / "s4" / "dense" / "run_0")
    (folder / "config.yaml").unlink()
    run = read_run(folder)
    assert (run.task, run.label, run.seed, run.trained_length) == ("s4", "dense", "", None)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_half_a_configuration_is_none(tmp_path: Path, make_run: MakeRun, share: float) -> None:
    folder = make_run(tmp_path / "a5" / "lstm" / "run_0")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text[: int(share * text.index("ckpt_path"))])
    run = read_run(folder)
    assert run.config == {}
    assert len(run.warnings) == 1
    assert run.warnings[0].startswith("config.yaml ")
    assert run.label == "lstm"
    assert run.steps == 600


def test_a_configuration_of_other_bytes(tmp_path: Path, make_run: MakeRun) -> None:
    folder = make_run(tmp_path / "run_0")
    (folder / "config.yaml").write_bytes(b"\xff\xfe\x00")
    assert read_run(folder).warnings == ["config.yaml cannot be read, not UTF-8"]


def test_half_a_curve(tmp_path: Path, make_run: MakeRun) -> None:
    folder = make_run(tmp_path / "run_0")
    path = folder / "length_curve.csv"
    text = path.read_text()
    for cut, left in ((1, 2), (3, 2), (10, 2), (30, 1)):
        path.write_text(text[:-cut])
        run = read_run(folder)
        assert run.finished
        assert [row["length"] for row in run.curve] == [16, 50][:left]
        assert run.warnings == [f"length_curve.csv is cut off, {left} rows of it are used"]
    for content, warning in (("", "cut off, 0 rows"), ("length,tok", "cut off, 0 rows"), ("a\nb\nc\n", "not a table")):
        path.write_text(content)
        assert read_run(folder).curve == []
        assert warning in read_run(folder).warnings[0]


def test_where_the_curve_is_cut_off_that_of_the_events_is_used(tmp_path: Path, make_run: MakeRun) -> None:
    lengths = ((16, 1.0), (50, 0.5), (128, 0.25))
    logged = [(2000.0, length, "length_curve/sequence_accuracy", accuracy) for length, accuracy in lengths]
    folder = make_run(tmp_path / "run_0", extra=logged)
    text = (folder / "length_curve.csv").read_text()
    assert read_run(folder).curve[1]["sequence_accuracy"] == 0.95
    (folder / "length_curve.csv").write_text(text[:-3])
    assert [(row["length"], row["sequence_accuracy"]) for row in read_run(folder).curve] == list(lengths)


def test_iterations_are_the_mean_over_the_layers(tmp_path: Path, make_run: MakeRun) -> None:
    tag = "validation/solver/layer_{}/iterations"
    logged = [(1010.0 + step, step, tag.format(layer), 10.0 * layer + step) for step in (1, 2) for layer in (0, 1)]
    run = read_run(make_run(tmp_path / "run_0", extra=logged))
    assert run.iterations().values.tolist() == [6, 7]
    assert run.iterations().steps.tolist() == [1, 2]


def test_a_run_that_went_on_from_another_ones_checkpoint_says_so(tmp_path: Path, make_run: MakeRun) -> None:
    own = str(tmp_path / "own" / "last.ckpt")
    assert read_run(make_run(tmp_path / "own", ckpt_path=own)).warnings == []
    run = read_run(make_run(tmp_path / "run_0", ckpt_path="elsewhere/last.ckpt"))
    assert run.warnings == ["went on from elsewhere/last.ckpt, what was before is not in its curves"]


def test_flattened_configurations() -> None:
    config = {
        "a": {"class_path": "x.y.Z", "init_args": {"n": 1.0, "on": True, "list": [1, None]}},
        "b": [{"c": 2}],
        "d": {},
    }
    flat = {"a": "Z", "a.n": "1", "a.on": "true", "a.list": "[1, null]", "b.0.c": "2"}
    assert dict(flatten(config)) == flat


def test_lengths() -> None:
    assert [nearest_length([8, 16, 50], length) for length in (1, 8, 15, 16, 1000)] == [8, 8, 8, 16, 50]


def test_the_label_is_that_of_figures(tmp_path: Path, make_run: MakeRun) -> None:
    assert read_run(make_run(tmp_path / "run_0", model__mixer=DENSE)).label == mixer_label(DENSE)
