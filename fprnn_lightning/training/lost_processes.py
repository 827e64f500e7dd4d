"""What becomes of a run when a process of it, started by Lightning from the first, is lost: all end, with one sentence.

The first process may be waiting for the lost one inside a collective, where no exception reaches it, so a thread looks
after the others. Mostly it has nothing to do: after a signal or a mistake all end by themselves, and gloo says that a
process is gone. So it gives the first process time to leave the run by itself, and acts if it does not. Where the first
fails, the others have as long.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from time import monotonic

from lightning.pytorch.strategies.launchers import subprocess_script

from fprnn_lightning.sentences import LOST_PROCESS

PERIOD = 0.5  # seconds between looks
GRACE = 5.0  # seconds in which the first process may notice by itself that another is lost
REGULAR_GRACE = 30.0  # seconds in which it may end as another has, which was told to or has found a mistake
REGULAR = {2, 128 + signal.SIGINT, 128 + signal.SIGUSR1, 128 + signal.SIGTERM}  # exit codes


@contextmanager
def ending_with_lost_processes() -> Iterator[None]:
    """A context of a run in which a lost process that Lightning has started ends the others and this one, by code 1."""
    left, deciding, started = Event(), Lock(), []

    def look_after(processes: list[subprocess.Popen]) -> None:
        started.extend(processes)
        Thread(target=_look_after, args=(processes, left, deciding), daemon=True).start()

    lightnings = subprocess_script._launch_process_observer  # it kills all without a word
    subprocess_script._launch_process_observer = look_after
    failed = True
    try:
        yield
        failed = False
    finally:
        subprocess_script._launch_process_observer = lightnings
        with deciding:
            left.set()
        if failed:
            _end(started)


def _look_after(processes: list[subprocess.Popen], left: Event, deciding: Lock) -> None:
    while not any(process.poll() for process in processes):
        if left.wait(PERIOD) or all(process.returncode == 0 for process in processes):
            return
    lost = next(process for process in processes if process.returncode)
    if left.wait(REGULAR_GRACE if lost.returncode in REGULAR else GRACE):
        return
    with deciding:
        if not left.is_set():
            for process in processes:
                process.kill()
            sys.stdout.flush()
            print(f"error: {LOST_PROCESS} (process {lost.pid} {_how(lost.returncode)})", file=sys.stderr, flush=True)
            os._exit(1)


def _end(processes: list[subprocess.Popen]) -> None:
    """Has processes end that do not by themselves, where the first has failed and they may wait for it."""
    last = monotonic() + GRACE
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, last - monotonic()))
        process.kill()


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
