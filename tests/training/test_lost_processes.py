"""The first process of a run ends with one that it has started and lost, but only if it does not end by itself."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest
from lightning.pytorch.strategies.launchers import subprocess_script

from fprnn_lightning.training import ending_with_lost_processes, lost_processes

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["fprnn_lightning.cli"])
LIGHTNINGS = subprocess_script._launch_process_observer


def _first(folder: Path, commands: list[str], seconds: float) -> None:
    """A run that starts others by Lightning, takes some seconds, and ends by itself with code 7."""
    lost_processes.GRACE, lost_processes.REGULAR_GRACE, lost_processes.PERIOD = 0.3, 1.5, 0.05
    with (folder / "output").open("w") as output:
        os.dup2(output.fileno(), 2)
    with ending_with_lost_processes():
        others = [subprocess.Popen(["sh", "-c", command]) for command in commands]
        (folder / "others").write_text(" ".join(str(other.pid) for other in others))
        subprocess_script._launch_process_observer(others)
        sleep(seconds)
    sleep(0.5)
    print("ended by itself", file=sys.stderr)
    sys.exit(7)


def ended(folder: Path, commands: list[str], seconds: float) -> tuple[int, str]:
    """The exit code of such a run, and what it has said."""
    process = PROCESSES.Process(target=_first, args=(folder, commands, seconds))
    process.start()
    process.join(30)
    return process.exitcode, (folder / "output").read_text()


@pytest.mark.parametrize(
    ("command", "end"),
    [("kill -9 $$", "was killed by SIGKILL"), ("exit 1", "ended with code 1"), ("exit 143", "ended with code 143")],
)
def test_a_process_that_waits_for_a_lost_one_ends_with_it(tmp_path: Path, command: str, end: str) -> None:
    code, said = ended(tmp_path, ["exec sleep 60", command], 60)
    assert code == 1
    (sentence,) = said.splitlines()
    assert sentence.startswith("error: another process of this run has ended or does not answer, so this one ends too")
    assert sentence.endswith(f" {end})")
    other = Path("/proc", (tmp_path / "others").read_text().split()[0], "exe")
    deadline = monotonic() + 5
    while other.exists():
        assert monotonic() < deadline, "the other ends too"
        sleep(0.01)


@pytest.mark.parametrize(
    ("command", "seconds"),
    [("exit 143", 0.8), ("exit 2", 0.8), ("kill -9 $$", 0.1), ("exit 0", 0.8), ("exec sleep 2", 0.2)],
    ids=["stopped", "mistaken", "lost, and noticed", "over", "still at it"],
)
def test_a_process_that_ends_by_itself_is_not_overtaken(tmp_path: Path, command: str, seconds: float) -> None:
    assert ended(tmp_path, [command], seconds) == (7, "ended by itself\n")


def test_outside_of_a_run_lightning_is_left_alone() -> None:
    with ending_with_lost_processes():
        assert subprocess_script._launch_process_observer is not LIGHTNINGS
    assert subprocess_script._launch_process_observer is LIGHTNINGS
