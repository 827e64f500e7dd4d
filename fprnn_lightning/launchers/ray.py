"""Tasks on the machines of a Ray cluster, or on this one, each when its share of them is free."""

import os
import signal
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from time import sleep

from fprnn_lightning.launchers import process
from fprnn_lightning.launchers.base import Launcher, Snapshot, Task
from fprnn_lightning.sentences import UsageError, one_line

POLL_SECONDS = 0.5


class Ray(Launcher):
    """Runs tasks by Ray, as many at a time as it has cores and GPUs for, --jobs at most.

    The machines must have this package, and share the folder that it is started in.

    Args:
        address: of a cluster, such as auto or ray://head:10001; null starts Ray on this machine, for as long as needed.
        cpus: cores of each task.
        gpus: of each task; a share such as 0.5 lets two share one.
    """

    def __init__(self, address: str | None = None, cpus: float = 1.0, gpus: float = 0.0) -> None:
        self.address = address
        self.cpus = cpus
        self.gpus = gpus

    def check(self) -> None:
        """Needs the package ray."""
        if find_spec("ray") is None:
            raise UsageError("launcher Ray: Ray is not installed, pip install -c constraints.txt -e '.[ray]'")

    def launch(self, tasks: Sequence[Task], jobs: int | None, folder: Path) -> Iterator[Snapshot]:
        """As in `Launcher`. Closed early, it terminates what runs and waits for it."""
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(self.address or "local", log_to_driver=False, include_dashboard=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UsageError(f"launcher Ray: cannot reach {self.address}: {one_line(error)}") from error
        signal.signal(signal.SIGTERM, handler)  # Ray has put its own
        remote = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=0)(run)
        waiting, submitted, ended = iter(tasks), {}, {}
        try:
            while len(ended) < len(tasks):
                for task in islice(waiting, (jobs or len(tasks)) - len(submitted)):
                    absolute = Task(task.name, task.command, task.folder.absolute())
                    submitted[remote.remote(absolute, os.getcwd())] = task
                done, _ = ray.wait(list(submitted), num_returns=1, timeout=POLL_SECONDS)
                for reference in done:
                    task = submitted.pop(reference)
                    try:
                        ended[task.name] = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        ended[task.name] = one_line(error)
                yield ended | {task.name: None for task in submitted.values() if process.is_running(task)}
        finally:
            for reference in submitted:
                ray.cancel(reference)
            ray.wait(list(submitted), num_returns=len(submitted), timeout=None) if submitted else None
            ray.shutdown()


def run(task: Task, folder: str) -> str:
    """Runs a task on a machine of the cluster, from a folder, and says how it ended.

    A process that still runs there is waited for. When Ray cancels this function, the process is terminated.
    """
    os.chdir(folder)
    while not (started := process.start(task, {})):
        sleep(POLL_SECONDS)
    try:
        while started.poll() is None:
            sleep(POLL_SECONDS)  # Ray interrupts this, but no waiting for a process
        return process.ending(started.returncode)
    except KeyboardInterrupt:
        process.terminate([started])
        raise
