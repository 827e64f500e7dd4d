"""Tasks as a job array of Slurm: a file with one command a line, and a job script that runs the line of its index."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep

from fprnn_lightning.launchers.base import Launcher, Snapshot, Task
from fprnn_lightning.sentences import UsageError, one_line

NOT_RUNNING_YET = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING", "SUSPENDED"}


class Slurm(Launcher):
    """Submits tasks as one job array, at most --jobs of them at a time, and waits for them.

    It writes job.sh and commands.txt into the folder slurm of the sweep. Ctrl-C ends the waiting, not the jobs.

    Args:
        partition: of the cluster; null leaves it to Slurm.
        time: limit of each task, as Slurm writes it: 4:00:00.
        gpus: of each task.
        cpus: cores of each task.
        memory: of each task, as Slurm writes it: 16G.
        signal: what a task is sent before its time is over, and how many seconds before.
        requeue: whether a task that a node failure or another job ends may be run again.
        lines: of the job script's head besides, each without its #SBATCH: ["--account=mine", "--nice=10"].
        wait: whether to wait for the tasks; the same command with --resume looks at them later.
        poll_seconds: between looks at the queue.
    """

    def __init__(
        self,
        partition: str | None = None,
        time: str | None = None,
        gpus: int = 0,
        cpus: int = 2,
        memory: str | None = None,
        signal: str | None = "USR1@120",
        requeue: bool = True,
        lines: list[str] | None = None,
        wait: bool = True,
        poll_seconds: float = 10.0,
    ) -> None:
        self.options = [
            f"--{name}={value}"
            for name, value in (
                ("ntasks", 1),
                ("cpus-per-task", cpus),
                ("gpus", gpus or None),
                ("mem", memory),
                ("partition", partition),
                ("time", time),
                ("signal", signal),
            )
            if value is not None
        ]
        self.options += ["--requeue" if requeue else "--no-requeue", *(lines or [])]
        self.wait = wait
        self.poll_seconds = poll_seconds

    def check(self) -> None:
        """Needs the programs of Slurm."""
        for program in ("sbatch", "squeue"):
            if not shutil.which(program):
                raise UsageError(f"launcher Slurm: there is no {program} here, is this a machine of the cluster?")

    def launch(self, tasks: Sequence[Task], jobs: int | None, folder: Path) -> Iterator[Snapshot]:
        """As in `Launcher`; without `jobs` as many at a time as Slurm gives. Jobs go on when it is closed."""
        place = (folder / "slurm").absolute()
        if (place / "job").exists() and (left := _queue(job := (place / "job").read_text())):
            raise UsageError(
                f"{len(left)} runs of job {job} are still in Slurm's queue: wait for them, or end them by scancel {job}"
            )
        job = self._submit(tasks, jobs, place)
        print(f"job {job}: {len(tasks)} runs, their commands are in {place / 'commands.txt'}", flush=True)
        if not self.wait:
            return
        ended = {}
        try:
            while len(ended) < len(tasks):
                try:
                    queue = _queue(job)
                except UsageError as error:  # such as a controller that is being restarted; the job goes on meanwhile
                    print(error, file=sys.stderr, flush=True)
                    sleep(self.poll_seconds)
                    continue
                gone = [index for index, task in enumerate(tasks) if index not in queue and task.name not in ended]
                ended |= {tasks[index].name: how for index, how in _endings(job, gone).items()}
                running = [tasks[index].name for index, state in queue.items() if state not in NOT_RUNNING_YET]
                yield ended | dict.fromkeys(running)
                if len(ended) < len(tasks):
                    sleep(self.poll_seconds)
        except KeyboardInterrupt:
            print(f"job {job} goes on; scancel {job} ends it")
            raise

    def _submit(self, tasks: Sequence[Task], jobs: int | None, place: Path) -> str:
        place.mkdir(parents=True, exist_ok=True)
        for task in tasks:
            task.folder.mkdir(parents=True, exist_ok=True)
        commands = [
            f"exec {shlex.join(task.command)} >> {shlex.quote(str(task.log.absolute()))} 2>&1\n" for task in tasks
        ]
        (place / "commands.txt").write_text("".join(commands))
        head = [f"--job-name={place.parent.name}", f"--output={place}/%A_%a.log", *self.options]
        line = f'"$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(place / "commands.txt"))})"'
        script = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in head),
            'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"',
            f"cd {shlex.quote(os.getcwd())}",
            f"srun bash -c {line}",
        ]
        (place / "job.sh").write_text("\n".join([*script, ""]))
        array = f"--array=0-{len(tasks) - 1}" + (f"%{jobs}" if jobs else "")
        job = _ask("sbatch", array, "--parsable", str(place / "job.sh")).strip().partition(";")[0]
        (place / "job").write_text(job)
        return job


def _ask(program: str, *arguments: str) -> str:
    """What a program of Slurm's prints."""
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise UsageError(f"launcher Slurm: there is no {program} here") from None
    except subprocess.CalledProcessError as error:
        raise UsageError(f"launcher Slurm: {program} failed: {one_line(error.stderr)}") from error


def _queue(job: str) -> dict[int, str]:
    """The state of each task of a job that is still in the queue, by its index."""
    try:
        lines = _ask("squeue", "--noheader", "--array", f"--jobs={job}", "--format=%K %T").splitlines()
    except UsageError as error:
        if "Invalid job id" in str(error):  # Slurm has forgotten it
            return {}
        raise
    return {int(index): state for index, state in (line.split() for line in lines)}


def _endings(job: str, indices: list[int]) -> dict[int, str]:
    """How tasks ended, in Slurm's words if the cluster keeps accounts."""
    if not indices:
        return {}
    try:
        lines = _ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}", "--format=JobID,State")
    except UsageError:
        lines = ""
    told = dict(re.findall(r"^\d+_(\d+)\|(.+)$", lines, re.MULTILINE))
    return {index: told.get(str(index), "no longer in the queue") for index in indices}
