"""What a sweep shows while it runs: in a terminal a table of its runs, renewed in place; else plain lines, one when a
run starts or ends, and from time to time one for each that runs.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from fprnn_lightning.launchers.process import PROMPT

STYLES = {"running": "bold", "testing": "bold", "finished": "green", "crashed": "red", "waiting": "dim"}
SHOWN = ("loss", "accuracy", "length")
TAIL_BYTES = 20_000


@dataclass
class Status:
    """A run as it is shown: its state (a key of `STYLES`), what it printed so far, and how long it has run."""

    name: str
    state: str
    log: Path
    minutes: float


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines that a task printed, since it was last started, but for empty ones; none if it has not been."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    start = max((index for index, line in enumerate(lines) if line.startswith(PROMPT)), default=-1)
    return lines[start + 1 :][-count:]


def progress(log: Path) -> dict[str, str]:
    """What the last line about training says: step, loss, accuracy and so on; nothing if there is none yet."""
    for line in reversed(last_lines(log, 200)):
        if found := re.match(r"step (\d+(?:/\d+)?)  (.+)", line):
            return {"step": found[1], **dict(re.findall(r"(\S+) (\S+)", found[2]))}
    return {}


def is_testing(log: Path) -> bool:
    """Whether the last line is of the test that follows training."""
    return any(line.startswith(("testing at", "tested on")) for line in last_lines(log, 1))


class Display(ABC):
    """Shows a sweep's runs, as a context."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        return None

    @abstractmethod
    def show(self, runs: list[Status]) -> None:
        """Shows how the runs are now."""


class LiveTable(Display):
    """A table on a terminal, as high as fits: what runs and what crashed comes before what has ended or waits."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, auto_refresh=False)
        self.shown_at = -float("inf")

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.live.stop()

    def show(self, runs: list[Status]) -> None:
        if monotonic() - self.shown_at >= 1 or not any(run.state in ("running", "waiting") for run in runs):
            self.live.update(table(runs, self.console.height - 6), refresh=True)
            self.shown_at = monotonic()


class Lines(Display):
    """Plain lines.

    Args:
        seconds: between lines about the runs that run.
    """

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self.states: dict[str, str] = {}
        self.shown_at = monotonic()

    def show(self, runs: list[Status]) -> None:
        counts = Counter(run.state for run in runs)
        ended = counts["finished"] + counts["crashed"]
        due = monotonic() - self.shown_at >= self.seconds
        for run in runs:
            before = self.states.setdefault(run.name, "waiting" if run.state == "running" else run.state)
            if run.state != before or (due and run.state == "running"):
                text = f"{run.name}: {run.state}"
                if run.state in ("finished", "crashed"):
                    text += f" after {run.minutes:.1f} minutes, {ended} of {len(runs)} have ended"
                elif before == "running":
                    text += "".join(f"  {name} {value}" for name, value in progress(run.log).items())
                print(text, flush=True)
            self.states[run.name] = run.state
        if due:
            self.shown_at = monotonic()


def table(runs: list[Status], rows: int) -> Table:
    """The runs as a table of at most so many rows, and their number by state."""
    counts = Counter(run.state for run in runs)
    order = ("running", "crashed", "waiting", "finished")
    by_importance = sorted(runs, key=lambda run: order.index(run.state))
    kept = {run.name for run in by_importance[: max(1, rows)]}
    shown = Table(
        caption=" · ".join(f"{counts[state]} {state}" for state in ("finished", *order[:3]) if counts[state]),
        caption_justify="left",
    )
    shown.add_column("run", no_wrap=True)
    shown.add_column("state")
    for name in ("step", *SHOWN, "minutes"):
        shown.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        if run.name in kept:
            told = progress(run.log)
            state = "testing" if run.state == "running" and is_testing(run.log) else run.state
            minutes = "" if run.state == "waiting" and not run.minutes else f"{run.minutes:.1f}"
            cells = [run.name, state, told.get("step", ""), *(told.get(name, "") for name in SHOWN), minutes]
            shown.add_row(*cells, style=STYLES[state])
    return shown
