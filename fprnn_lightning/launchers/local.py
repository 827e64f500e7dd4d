"""Tasks on this machine, some at a time."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep

import torch

from fprnn_lightning.launchers import process
from fprnn_lightning.launchers.base import Launcher, Snapshot, Task

POLL_SECONDS = 0.2


class Local(Launcher):
    """Runs tasks on this machine, one after another or --jobs at a time, which share the cores.

    OMP_NUM_THREADS, unless it is set, is the number of cores divided by that of jobs. A task that an earlier launcher
    left running is waited for, then started again.
    """

    def check(self) -> None:
        """Nothing is needed."""

    def launch(self, tasks: Sequence[Task], jobs: int | None, folder: Path) -> Iterator[Snapshot]:
        """As in `Launcher`; without `jobs` one at a time. Closed early, it terminates what runs and waits for it."""
        jobs = jobs or 1
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // jobs)))}
        waiting, running, ended = list(tasks), {}, {}
        try:
            while waiting or running:
                for task in list(waiting):
                    if len(running) < jobs and (started := process.start(task, threads)):
                        running[task.name] = started
                        waiting.remove(task)
                for name, each in list(running.items()):
                    if each.poll() is not None:
                        ended[name] = process.ending(running.pop(name).returncode)
                yield ended | dict.fromkeys(running)
                sleep(POLL_SECONDS)
        finally:
            process.terminate(running.values())
