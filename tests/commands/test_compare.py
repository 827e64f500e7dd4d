"""The command: what it prints and writes, and what it says when it cannot."""

import csv
import errno
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from PIL import Image

from fprnn_lightning.cli import main
from fprnn_lightning.commands.compare import show
from fprnn_lightning.commands.groups import sections
from fprnn_lightning.commands.runs import find_runs, read_run
from fprnn_lightning.figures import mixer_style

MakeRun = Callable[..., Path]
FILES = ["compare.csv", "compare.html", "compare.png", "compare_runs.csv"]
DENSE = {
    "class_path": "DenseMixer",
    "init_args": {"core": {"class_path": "GatedDiagonal"}, "channel_mixer": {"class_path": "Householder"}},
}
FIXED_POINT = {**DENSE, "class_path": "FixedPointMixer"}


@pytest.fixture
def logs(tmp_path: Path, make_run: MakeRun) -> Path:
    """Two seeds of an LSTM and of a dense mixer, one run of a fixed-point mixer that isn't finished."""
    for seed in range(2):
        make_run(tmp_path / "logs" / "a5" / "lstm" / f"run_{seed}", seed, {16: 0.9 - seed / 7, 50: 0.1, 128: 0.0})
        make_run(tmp_path / "logs" / "a5" / "dense" / f"run_{seed}", seed, model__mixer=DENSE)
    extra = [(1050.0, 199, "validation/solver/layer_0/iterations", 12.0)]
    options = {"model__mixer": FIXED_POINT, "finished": False, "validation": {200: 0.7}, "extra": extra}
    make_run(tmp_path / "logs" / "a5" / "fixed_point" / "run_0", hparams={"parameters": 4321.0}, **options)
    return tmp_path / "logs"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares tests that look at other things the drawing."""
    monkeypatch.setattr("fprnn_lightning.commands.compare.picture", lambda parts: b"")
    monkeypatch.setattr("fprnn_lightning.commands.compare_page.panels", lambda part: [])


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *parts: str) -> None:
    """Asserts that the arguments end in one sentence with these parts and exit code 2."""
    assert main(["compare", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (sentence,) = err.splitlines()
    assert sentence.startswith("error: ")
    for part in parts:
        assert part in sentence


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("undrawn")
def test_it_prints_a_table_and_says_where_the_files_are(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["compare", str(logs)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line for line in out.splitlines() if "■" in line]
    assert [line.strip(" ■").split("  ")[0] for line in lines] == [
        "dense GatedDiagonal Householder",
        "lstm",
        "fixed_point GatedDiagonal Householder",
    ]
    assert "0 + 1" in lines[2]
    assert "4.32k" in lines[2]
    assert "70.0*" in lines[2]
    assert "12.0" in lines[2]
    assert "Best first, by solved, then seq., then tokens, then steps." in " ".join(out.split())
    assert out.splitlines()[-1].startswith(f"{logs / 'compare.html'} has the curves")
    assert written(logs) == FILES


@pytest.mark.parametrize("columns", [80, 100, 140, 200])
def test_the_table_fits_the_terminal(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    show(sections([read_run(folder) for folder in find_runs([logs])]), {})
    table = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in table.splitlines()) <= columns
    for text in ("GatedDiagonal", "fixed_point", "tokens/s", "solved", "minutes", "82.9", "± 10.1", "70.0*", "0 + 1"):
        assert text in table
    assert "5.40k" in table
    assert "…" not in table


def test_columns_that_have_no_room_are_named(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    show(sections([read_run(folder) for folder in find_runs([logs])]), {})
    table = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 60
    assert "± 10.1" in table
    assert "5.40k" not in table
    assert "iter., tokens/s: see compare.html." in " ".join(table.split())


@pytest.mark.usefixtures("undrawn")
def test_csv_has_a_row_a_group_and_one_a_run_with_all_digits(logs: Path) -> None:
    assert main(["compare", str(logs), "--output", str(logs / "out" / "deeper")]) == 0
    groups, runs = (rows(logs / "out" / "deeper" / name) for name in ("compare.csv", "compare_runs.csv"))
    lstm = groups[1]
    assert (lstm["task"], lstm["group"], lstm["runs"], lstm["seeds"]) == ("a5", "lstm", "2", "0 1")
    accuracies = [0.9, round(0.9 - 1 / 7, 6)]
    assert float(lstm["sequence_accuracy_mean"]) == statistics.fmean(accuracies)
    assert float(lstm["sequence_accuracy_deviation"]) == statistics.stdev(accuracies)
    assert lstm["model.mixer"] == "LSTMMixer"
    fixed_point = groups[2]
    assert (fixed_point["unfinished"], fixed_point["parameters"], fixed_point["provisional"]) == ("1", "4321.0", "True")
    assert fixed_point["sequence_accuracy_deviation"] == ""
    assert [Path(run["folder"]).name for run in runs] == ["run_0", "run_1", "run_0", "run_1", "run_0"]
    assert [run["status"] for run in runs] == ["finished"] * 4 + ["unfinished"]
    assert float(runs[3]["sequence_accuracy"]) == accuracies[1]


def test_png_shows_the_mixers_in_their_colours(logs: Path) -> None:
    assert main(["compare", str(logs)]) == 0
    with Image.open(logs / "compare.png") as image:
        assert image.format == "PNG"
        colours = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in image.convert("RGB").getcolors(2**24)}
    for label in ("lstm", "dense GatedDiagonal Householder", "fixed_point GatedDiagonal Householder"):
        assert mixer_style(label).colour in colours


@pytest.mark.usefixtures("undrawn")
def test_several_tasks_have_a_table_each(logs: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(logs / "s3" / "lstm" / "run_0", data__init_args={"group": "S3", "train_length": 16})
    assert main(["compare", str(logs / "a5"), str(logs / "s3")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 tasks, each with a table of its own: a5, s3.")
    assert out.count("■ lstm") == 2
    assert written(logs / "a5") == FILES
    assert written(logs / "s3") == []


@pytest.mark.usefixtures("undrawn")
def test_damaged_runs_are_told_and_all_are_compared(
    logs: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {
        "config.yaml": [
            b"model:\n  mixer: [half",
            b"just words",
            b"model: 3\ntrainer: 4\ndata: 5\nckpt_path: 6\n",
            b"\xff",
        ],
        "length_curve.csv": [b"length,tok", b"\xff\x00"],
        "events.out.tfevents.1000.host.1.0": [b"", b"\0" * 1000],
    }
    runs = []
    for name, some in contents.items():
        for content in some:
            runs.append(make_run(logs / "a5" / "lstm" / f"run_{len(runs) + 2}", seed=len(runs) + 2))
            (runs[-1] / name).write_bytes(content)
    runs.append(make_run(logs / "a5" / "lstm" / "run_20", seed=20))
    events = runs[-1] / "events.out.tfevents.1000.host.1.0"
    events.write_bytes(events.read_bytes()[:700])
    runs.append(make_run(logs / "a5" / "lstm" / "run_21", seed=21))
    (runs[-1] / "config.yaml").unlink()
    assert main(["compare", str(logs)]) == 0
    out, page, table = capsys.readouterr().out, (logs / "compare.html").read_text(), rows(logs / "compare_runs.csv")
    assert len(table) == 5 + len(runs)
    for run in runs:
        assert f"note: {run}: " in out
        assert str(run.relative_to(logs)) in page
        (row,) = (row for row in table if row["folder"] == str(run))
        assert row["status"] == "finished"
        assert row["notes"]
        assert (row["steps_to_99"] == "400.0") == ("tfevents" not in row["notes"])
        assert (row["solved_length"] == "50.0") == ("length_curve" not in row["notes"])


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_has_logged_nothing_is_left_out_and_named(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = logs / "a5" / "lstm" / "run_2"
    empty.mkdir()
    (empty / "config.yaml").write_text((logs / "a5" / "lstm" / "run_0" / "config.yaml").read_text())
    assert main(["compare", str(logs)]) == 0
    assert f"note: {empty}: left out, nothing is logged (yet)" in capsys.readouterr().out
    assert f"{empty}: nothing is logged (yet)" in (logs / "compare.html").read_text()
    assert rows(logs / "compare_runs.csv")[-1]["status"] == "left out"
    assert next(row for row in rows(logs / "compare.csv") if row["group"] == "lstm")["runs"] == "2"


@pytest.mark.usefixtures("undrawn")
def test_many_notes_are_cut_short(logs: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(2, 20):
        run = make_run(logs / "a5" / "lstm" / f"run_{n}", seed=n)
        (run / "length_curve.csv").write_text("")
    assert main(["compare", str(logs)]) == 0
    out = capsys.readouterr().out
    assert out.count("note: ") == 13
    assert "note: 6 more in compare.html" in out


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_repeats_another_one_is_named(
    logs: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    again = make_run(logs / "a5" / "lstm" / "run_2", seed=1)
    assert main(["compare", str(logs)]) == 0
    expected = f"note: {again}: repeats {logs / 'a5' / 'lstm' / 'run_1'}, seed included, and counts nonetheless"
    assert expected in capsys.readouterr().out


def test_mistakes_are_told_in_one_sentence(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(capsys, [str(tmp_path / "absent")], "absent is not there")
    refused(capsys, [str(logs), str(tmp_path / "absent")], "absent is not there")
    refused(capsys, [str(logs / "a5" / "lstm" / "run_0" / "config.yaml")], "config.yaml is no folder")
    refused(capsys, [str(empty)], f"no run in {empty}", "config.yaml")
    refused(capsys, [], "folders")
    refused(capsys, [str(logs), "--outptu", "x"], "unknown option outptu", "output")
    (empty / "config.yaml").write_text("")
    refused(capsys, [str(empty)], "nothing to compare", "nothing is logged (yet)", "config.yaml is empty")
    assert written(logs) == []
    assert written(empty) == ["config.yaml"]


@pytest.mark.usefixtures("undrawn")
def test_an_output_that_cannot_be_made(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    refused(capsys, [str(logs), "--output", str(tmp_path / "file")], "cannot write into", "file", "--output")
    refused(capsys, [str(logs), "--output", str(tmp_path / "file" / "deeper")], "cannot write into", "--output")


@pytest.mark.usefixtures("undrawn")
def test_a_full_disk_leaves_what_was_there(
    logs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FILES:
        (logs / name).write_text("old")
    write_bytes = Path.write_bytes

    def full(path: Path, content: bytes) -> None:
        if "png" in path.name:
            write_bytes(path, content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    refused(capsys, [str(logs)], "cannot write into", "No space left on device")
    assert written(logs) == FILES
    assert {(logs / name).read_text() for name in FILES} == {"old"}


def test_fits_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two seeds of a real fit, tiny: what fit writes is what compare reads."""
    sizes = {"batch_size": 4, "train_length": 4, "validation_lengths": [4], "test_lengths": [4, 8]}
    config = {
        "data": {"class_path": "WordProblem", "init_args": {"group": "S3", **sizes, "test_sequences": 8}},
        "model": {
            "mixer": "FixedPointMixer",
            "width": 8,
            "curriculum": {"class_path": "FixedLength", "init_args": {"length": 4}},
        },
        "trainer": {"max_steps": 4, "val_check_interval": 2, "accelerator": "cpu", "log_every_n_steps": 1},
    }
    config["trainer"] |= {
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "default_root_dir": str(tmp_path),
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    for seed in "01":
        options = ["--seed_everything", seed, "--data.seed", seed]
        assert main(["fit", "--config", str(tmp_path / "small.yaml"), *options]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "note:" not in out
    (row,) = rows(tmp_path / "compare.csv")
    assert (row["task"], row["group"]) == ("s3", "fixed_point GatedDiagonal Householder")
    assert (row["runs"], row["unfinished"], row["seeds"], row["trained_length"]) == ("2", "0", "0 1", "4")
    assert float(row["steps_mean"]) == 4
    assert float(row["iterations_mean"]) > 1
    assert float(row["tokens_per_second_mean"]) > 0
    curves = [rows(run / "length_curve.csv") for run in (tmp_path / "s3" / "fixed_point").iterdir()]
    accuracies = [float(curve[0]["token_accuracy"]) for curve in curves]
    assert float(row["token_accuracy_mean"]) == pytest.approx(statistics.fmean(accuracies))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "folders" in out
    assert "--output" in out
    assert "compare.html" in out
