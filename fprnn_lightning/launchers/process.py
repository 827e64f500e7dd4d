"""A task as a process of this machine, which two never are at a time and which does not outlive who started it.

The process holds a lock on <folder>/lock: it inherits the open file, so that the lock goes when the process does,
however that ends. On Linux the kernel sends it SIGTERM when its parent dies, be it by SIGKILL. It is in a process group
of its own, as Ctrl-C in a terminal is for its parent, which then decides.
"""

import ctypes
import fcntl
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import partial

from fprnn_lightning.launchers.base import Task

LIBC = ctypes.CDLL(None)
PROMPT = "$ "  # before the command, in output.log
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def start(task: Task, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
    """Starts a task.

    Args:
        task: what to start.
        environment: variables besides those of this process.

    Returns:
        The process, or None if a process of the same folder still runs.
    """
    task.folder.mkdir(parents=True, exist_ok=True)
    with (task.folder / "lock").open("w") as lock, task.log.open("a") as log:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        print(f"{PROMPT}{shlex.join(task.command)}", file=log, flush=True)
        return subprocess.Popen(
            task.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            pass_fds=[lock.fileno()],
            process_group=0,
            preexec_fn=partial(_end_with_parent, os.getpid()) if sys.platform == "linux" else None,
        )


def is_running(task: Task) -> bool:
    """Whether a process holds the task's folder, on whatever machine that shares it."""
    if not (task.folder / "lock").exists():
        return False
    with (task.folder / "lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def terminate(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Asks processes to end and waits until they have; a second Ctrl-C kills them."""
    processes = list(processes)
    for process in processes:
        process.terminate()
    if processes:
        print(f"waiting for {len(processes)} to save and end", file=sys.stderr, flush=True)
    try:
        for process in processes:
            process.wait()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()
        raise


def ending(code: int) -> str:
    """How a process ended, of its return code: "exit code 1", or "SIGKILL" for -9."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _end_with_parent(parent: int) -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGTERM)
