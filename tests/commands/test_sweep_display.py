"""What a sweep shows of its runs: from their output, as lines and as a table."""

from io import StringIO

import pytest
from rich.console import Console

from fprnn_lightning.commands.sweep_display import Lines, LiveTable, Status, last_lines, progress, table

STEP = "step 500/3000  loss 1.234  accuracy 0.567  length 7  iterations 9.5  tokens/s 12,345"


@pytest.fixture
def log(tmp_path):
    log = tmp_path / "output.log"
    log.write_text(f"$ fit --a\nstep 9/10  loss 9.9\n\n$ fit --a\n{STEP}\nvalidation after step 600: loss 1\n")
    return log


def drawn(runs, rows=30):
    console = Console(file=StringIO(), width=120)
    console.print(table(runs, rows))
    return console.file.getvalue()


def test_progress_is_that_of_the_last_start(log):
    assert progress(log)["step"] == "500/3000"
    assert progress(log)["loss"] == "1.234"
    assert last_lines(log, 5) == [STEP, "validation after step 600: loss 1"]
    log.write_text(log.read_text() + "$ fit --a\n")
    assert progress(log) == {}
    assert last_lines(log, 5) == []


def test_a_run_that_has_not_started_has_no_progress(tmp_path):
    assert progress(tmp_path / "output.log") == {}


def test_a_long_output_is_read_from_its_end(log):
    log.write_text("$ fit\n" + "words\n" * 100_000 + STEP + "\n")
    assert progress(log)["length"] == "7"
    assert last_lines(log, 2) == ["words", STEP]


def test_the_table_shows_each_run(log):
    text = drawn([Status("dense-seed_0", "running", log, 1.25), Status("lstm-seed_0", "waiting", log.parent / "no", 0)])
    (dense,) = (line for line in text.splitlines() if "dense-seed_0" in line)
    for cell in ("running", "500/3000", "1.234", "0.567", "7", "1.2"):
        assert cell in dense
    assert "1 running · 1 waiting" in text
    with log.open("a") as file:
        file.write("testing at lengths up to 512 · logs\n")
    assert "testing" in drawn([Status("dense-seed_0", "running", log, 1.25)])


def test_a_low_terminal_shows_what_runs_and_what_crashed(log):
    states = ["finished"] * 20 + ["crashed", "running"] + ["waiting"] * 20
    text = drawn([Status(f"run_{i}", state, log, 1.0) for i, state in enumerate(states)], rows=3)
    assert [f"run_{i} " in text for i in (0, 20, 21, 22, 23)] == [False, True, True, True, False]
    assert "20 finished · 1 running · 1 crashed · 20 waiting" in text


def test_a_live_table_ends_as_the_last_state(log):
    console = Console(file=StringIO(), force_terminal=True, width=100, height=20)
    with LiveTable(console) as live:
        live.show([Status("dense", "running", log, 1.0)])
        live.show([Status("dense", "finished", log, 2.0)])
    assert "1 finished" in console.file.getvalue().rpartition("dense")[2]


def test_lines_tell_what_changes(log, capsys):
    lines = Lines(seconds=0.0)
    for states in (["waiting", "waiting"], ["running", "waiting"], ["running", "waiting"], ["finished", "crashed"]):
        lines.show([Status(name, state, log, 1.5) for name, state in zip(("a", "b"), states, strict=True)])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "a: running"
    assert told[1].startswith("a: running  step 500/3000  loss 1.234")
    assert told[2:] == [
        "a: finished after 1.5 minutes, 2 of 2 have ended",
        "b: crashed after 1.5 minutes, 2 of 2 have ended",
    ]
