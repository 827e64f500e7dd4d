"""Many runs from one file, each a `fit` of its own: what one question needs, started, watched, continued, compared.

A run of the sweep lives in <root>/<name of the sweep's file>/<name of the run>: there is its output.log, and
<task>/<mixer>/run_<n> as of any fit. It has finished when that has a length_curve.csv. What the sweep knows besides is
in state.yaml, which is for people: the command, how long, how it ended.
"""

import fcntl
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from types import FrameType

import yaml
from rich.console import Console

from fprnn_lightning.commands.sweep_display import Lines, LiveTable, Status, last_lines
from fprnn_lightning.commands.sweep_file import Run, read_sweep
from fprnn_lightning.launchers import Launcher, Local, Task
from fprnn_lightning.sentences import UsageError
from fprnn_lightning.whole_files import write_whole

PROGRAM = (sys.executable, "-m", "fprnn_lightning")
KEPT_LINES = 5  # of what a crashed run printed


def sweep(
    file: Path,
    check: Callable[[list[str]], None],
    jobs: int | None = None,
    resume: bool = False,
    launcher: Launcher = Local(),
    root: Path = Path("logs"),
    program: tuple[str, ...] = PROGRAM,
) -> None:
    """Trains every combination of a file, then compares the runs.

    The file has four keys, each of which may be absent:

        config: [configs/task/a5.yaml]       # configurations of all runs, stacked
        options: {trainer.max_steps: 3000}   # options of all runs: any keys of a configuration
        grid:                                # all combinations of
          mixer:                             #   named values: any options; `config` has further configurations
            dense: {config: configs/mixer/dense.yaml}
            wide: {config: configs/mixer/dense.yaml, model.width: 256}
          model.learning_rate: [0.001, 0.01] #   or the values of one key
          seed: [0, 1, 2]                    #   seed is both seed_everything and the data's seed
        runs:                                # and single runs, named
          lstm: {config: configs/mixer/lstm.yaml, seed: 0}

    That makes wide-learning_rate_0.001-seed_0 and so on, and lstm. All are checked before the first one starts. A run
    that crashes does not stop the others; the exit code is then 1. Ctrl-C and SIGTERM end the runs, which save first.

    Args:
        file: The sweep.
        check: Raises UsageError if what follows `fit` is mistaken.
        jobs: How many runs at a time, at most; the launcher's own number if left out: Local's is 1.
        resume: Go on with a sweep: finished runs are kept, stopped ones continued, crashed ones run again, those that
            have come into the file are added and those that are no longer in it left alone.
        launcher: Where runs are run.
        root: Folder of runs.
        program: What runs `fit`.

    Raises:
        UsageError: If the file or a run in it is mistaken, or the sweep has been started already.
        SystemExit: With 1 if runs have crashed, with 130 or 143 if it was stopped.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs: {jobs} runs at a time, must be at least 1")
    folder = root / file.stem
    runs = read_sweep(file)
    if folder.exists() and not resume:
        raise UsageError(f"{folder} exists already: --resume goes on with it, another --root starts anew")
    for run in runs:
        try:
            check(list(run.arguments))
        except UsageError as error:
            raise UsageError(f"{file}: {run.name}: {error}") from error
    launcher.check()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"root: cannot make {folder}, {error.strerror}") from error
    with only_here(folder), interruptible():
        state = State(folder, runs, program)
        state.report()
        state.save()
        try:
            follow(state, launcher, jobs)
        except KeyboardInterrupt as interrupt:
            state.stop()
            print(f"stopped; the same command with --resume goes on with {folder}", file=sys.stderr)
            raise SystemExit(interrupt.args[0] if interrupt.args else 130) from None
        finally:
            state.save()
    state.conclude()


@dataclass
class Record:
    """What a sweep knows of a run, in state.yaml."""

    arguments: list[str]
    state: str = "waiting"  # or running, stopped, finished, crashed
    minutes: float = 0.0
    ended: str = ""
    last_lines: list[str] = field(default_factory=list)


class State:
    """The runs of a sweep and how they are, kept in its folder.

    Args:
        folder: of the sweep.
        runs: those of the file.
        program: what runs `fit`.

    Raises:
        UsageError: if a run has finished with other options than the file has now.
    """

    def __init__(self, folder: Path, runs: list[Run], program: tuple[str, ...]) -> None:
        self.folder = folder
        self.program = program
        file = folder / "state.yaml"
        saved = yaml.safe_load(file.read_text()) if file.exists() else {}
        self.records = {name: Record(**record) for name, record in saved.items()}
        self.names = [run.name for run in runs]
        for run in runs:
            record = self.records.setdefault(run.name, Record(list(run.arguments)))
            if self.has_finished(run.name):
                if record.arguments != list(run.arguments):
                    changed = sorted({*record.arguments} ^ {*run.arguments})
                    raise UsageError(
                        f"{run.name} has finished with other options than it has now ({', '.join(changed)}): "
                        "give it another name, or the sweep another --root"
                    )
                record.state = "finished"
            else:
                record.arguments, record.state = list(run.arguments), "waiting"

    def has_finished(self, name: str) -> bool:
        """Whether a run has been trained and tested."""
        return any(self._curves(name))

    def _curves(self, name: str) -> Iterator[Path]:
        """What finished runs of this name have written last."""
        return (self.folder / name).glob("*/*/run_*/length_curve.csv")

    def report(self) -> None:
        """Says what there is to do."""
        finished = sum(self.records[name].state == "finished" for name in self.names)
        text = f"{self.folder}: {len(self.names)} runs"
        print(text + (f", {finished} of them finished already" if finished else ""), flush=True)
        if others := [name for name in self.records if name not in self.names]:
            print(f"no longer in the file, left alone: {', '.join(others)}", flush=True)

    def tasks(self) -> list[Task]:
        """What is left to run."""
        return [
            Task(name, self._command(name), self.folder / name)
            for name in self.names
            if self.records[name].state != "finished"
        ]

    def _command(self, name: str) -> tuple[str, ...]:
        own = [f"--trainer.default_root_dir={self.folder / name}", "--resume", "auto"]
        return (*self.program, "fit", *self.records[name].arguments, *own)

    def end(self, task: Task, how: str) -> None:
        """Notes that a run has ended."""
        record = self.records[task.name]
        record.state = "finished" if self.has_finished(task.name) else "crashed"
        record.ended = how
        record.last_lines = last_lines(task.log, KEPT_LINES) if record.state == "crashed" else []

    def stop(self) -> None:
        """Notes that nothing runs any more."""
        for name in self.names:
            if self.records[name].state == "running":
                self.records[name].state = "stopped"

    def save(self) -> None:
        """Writes state.yaml, all of it or nothing."""
        records = {name: asdict(record) for name, record in self.records.items()}
        text = yaml.safe_dump(records, sort_keys=False, allow_unicode=True, width=120)
        write_whole(self.folder / "state.yaml", lambda partial: partial.write_text(text))

    def statuses(self) -> list[Status]:
        """The runs as they are shown."""
        return [
            Status(name, record.state, self.folder / name / "output.log", record.minutes)
            for name, record in ((name, self.records[name]) for name in self.names)
        ]

    def conclude(self) -> None:
        """Compares what has finished, and says what has crashed and how.

        Raises:
            SystemExit: with 1 if a run has crashed.
        """
        from fprnn_lightning.commands.compare import compare

        if left := sum(self.records[name].state not in ("finished", "crashed") for name in self.names):
            print(
                f"{left} of {len(self.names)} runs have not ended; the same command with --resume looks at them again"
            )
            return
        finished, crashed = (
            [name for name in self.names if self.records[name].state == state] for state in ("finished", "crashed")
        )
        if finished:
            compare([curve.parent for name in finished for curve in self._curves(name)], self.folder)
        for name in crashed:
            print(f"\n{name} crashed with {self.records[name].ended}, {self.folder / name / 'output.log'} ends:")
            print("\n".join(f"    {line}" for line in self.records[name].last_lines))
        if crashed:
            raise SystemExit(f"{len(crashed)} of {len(self.names)} runs crashed; --resume runs them again")


def follow(state: State, launcher: Launcher, jobs: int | None) -> None:
    """Runs what is left to run, and shows how it goes."""
    tasks = {task.name: task for task in state.tasks()}
    console = Console()
    last = monotonic()
    with (
        LiveTable(console) if console.is_terminal else Lines() as display,
        closing(launcher.launch(list(tasks.values()), jobs, state.folder)) as snapshots,
    ):
        for snapshot in snapshots if tasks else ():
            minutes, last = (monotonic() - last) / 60, monotonic()
            before = [record.state for record in state.records.values()]
            for name, task in tasks.items():
                record = state.records[name]
                if record.state == "running":
                    record.minutes = round(record.minutes + minutes, 3)
                if record.state not in ("finished", "crashed"):
                    record.state = "running" if name in snapshot else "waiting"
                    if snapshot.get(name) is not None:
                        state.end(task, snapshot[name])
            if before != [record.state for record in state.records.values()]:
                state.save()
            display.show(state.statuses())


@contextmanager
def only_here(folder: Path) -> Iterator[None]:
    """Holds a sweep's folder.

    Raises:
        UsageError: if another process holds it.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"a sweep is running in {folder}") from None
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGTERM an interrupt like Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(128 + number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
