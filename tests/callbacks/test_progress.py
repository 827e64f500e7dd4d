"""Progress in a terminal (a bar) and elsewhere (plain lines)."""

import io
import re

import pytest

from fprnn_lightning.callbacks import Progress, SolverReport, Throughput
from fprnn_lightning.mixers.lstm import LSTMMixer


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def fit(small_learner, small_task, small_trainer):
    def run(progress, mixer=LSTMMixer):
        trainer = small_trainer(
            callbacks=[Throughput(), SolverReport(), progress],
            enable_progress_bar=True,
            limit_val_batches=1.0,
            val_check_interval=2,
            num_sanity_val_steps=1,
        )
        trainer.fit(small_learner(mixer=mixer), small_task())

    return run


def test_plain_lines_where_there_is_no_terminal(fit, capsys, iterating_mixer):
    fit(Progress(seconds=0.0), iterating_mixer)
    lines = capsys.readouterr().out.splitlines()
    number = r"[\d.,]+"
    step = rf"step (\d)/4  loss {number}  accuracy {number}  length 8  iterations 3.0  tokens/s {number}"
    assert [match[1] for line in lines if (match := re.fullmatch(step, line))] == ["1", "2", "3", "4"]
    validation = r"validation after step (\d): loss [\d.]+, whole sequences right [\d.]+ at 4, [\d.]+ at 8"
    assert [match[1] for line in lines if (match := re.fullmatch(validation, line))] == ["2", "4"]
    assert len(lines) == 6, "nothing else, and no sanity check"


def test_a_test_tells_how_far_it_is(small_learner, small_task, small_trainer, capsys):
    trainer = small_trainer(callbacks=[Progress(seconds=0.0)], enable_progress_bar=True)
    trainer.test(small_learner(), small_task(), verbose=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"testing at lengths up to 50 · {trainer.log_dir}", "tested on 1 batches", "tested on 2 batches"]


def test_plain_lines_are_rare_but_the_last_is_there(fit, capsys):
    fit(Progress(seconds=1e9))
    steps = re.findall(r"^step .*$", capsys.readouterr().out, re.MULTILINE)
    assert [line.split("  ")[0] for line in steps] == ["step 1/4", "step 4/4"]
    assert "iterations" not in steps[-1], "an LSTM does not iterate"


def test_a_line_shows_what_was_logged_at_its_step(small_learner, small_task, small_trainer, capsys):
    progress = Progress(seconds=0.0)
    trainer = small_trainer(callbacks=[progress], enable_progress_bar=True, max_steps=5, log_every_n_steps=2)
    trainer.fit(small_learner(), small_task())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/5", "step 4/5"]


def test_a_bar_over_max_steps_in_a_terminal(fit, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    fit(Progress(refresh_rate=1))
    shown = terminal.getvalue()
    assert re.search(r"Training 100%\|.*\| 4/4 .*loss=.*accuracy=.*length=8, tokens/s=", shown)
    assert "validation after step 4" in shown


def test_a_refresh_rate_of_0_shows_nothing(fit, capsys):
    fit(Progress(refresh_rate=0, seconds=0.0))
    assert capsys.readouterr().out == ""
