"""Starts functions or command lines as the ranks of a group of processes on this machine, and reads what they left.

Processes are forked from a server that has imported the package; each has one thread, an output file of its own, and a
deadline after which all are killed.
"""

import multiprocessing
import os
import pickle
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from fprnn_lightning.cli import main

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["fprnn_lightning.cli"])
SECONDS = 60.0
GPUS = torch.cuda.device_count()


class Ranks:
    """Processes 0 to `ranks` - 1, each of which calls function(*arguments) in a folder.

    Args:
        function: what each calls; its result is kept.
        ranks: how many there are.
        folder: where they work and write; made if it is not there.
        arguments: of the function.
        environment: variables beside, or instead of, those by which the ranks find each other.
    """

    def __init__(
        self, function: Callable, ranks: int, folder: Path, *arguments: Any, environment: dict[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
        together["WORLD_SIZE"] = str(ranks)
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            variables = {**together, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            variables |= environment or {}
            self._path(rank, "result").unlink(missing_ok=True)
            process = PROCESSES.Process(target=_run, args=(function, arguments, folder, rank, variables))
            process.start()
            self.processes.append(process)

    def wait(self, seconds: float = SECONDS) -> list[int]:
        """The exit codes of all, which end in time or are killed and told of."""
        deadline = monotonic() + seconds
        running = {process.sentinel for process in self.processes}
        while running and monotonic() < deadline:
            running -= set(wait(running, max(0.0, deadline - monotonic())))
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        assert not running, f"not over after {seconds:g} seconds\n{self.outputs()}"
        return [process.exitcode for process in self.processes]

    def results(self, seconds: float = SECONDS) -> list[Any]:
        """What the function has returned on each rank."""
        assert set(self.wait(seconds)) == {0}, self.outputs()
        return [pickle.loads(self._path(rank, "result").read_bytes()) for rank in range(len(self.processes))]

    def output(self, rank: int) -> str:
        """What a rank has printed, errors included."""
        return self._path(rank, "log").read_text()

    def outputs(self) -> str:
        """The end of what each rank has printed."""
        return "\n".join(f"--- rank {rank}\n{self.output(rank)[-3000:]}" for rank in range(len(self.processes)))

    def _path(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank_{rank}.{kind}"


def command_line(arguments: list[str], ranks: int, folder: Path, **options: Any) -> Ranks:
    """`python -m fprnn_lightning` with these arguments on so many processes; its result is the exit code.

    Where there are several GPUs, each process has one, and they talk by nccl.
    """
    if ranks > GPUS > 1:
        pytest.skip(f"needs {ranks} GPUs, here are {GPUS}")
    devices = [f"--trainer.accelerator={'gpu' if GPUS > 1 else 'cpu'}", f"--trainer.devices={ranks}"]
    devices += ["--trainer.strategy=ddp"] if ranks > 1 else []
    return Ranks(main, ranks, folder, [*arguments, *devices], **options)


def two_machines(arguments: Callable[[Path], list[str]], folder: Path) -> list[Ranks]:
    """The command line on two machines as torchrun starts it, with one process each.

    Args:
        arguments: what a machine is told, given the folder in which it works: that of the first ends in 0.
        folder: where these folders are made.
    """
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "a"}
    together |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    machines = []
    for machine in ("0", "1"):
        own, place = folder / machine, {**together, "RANK": machine, "GROUP_RANK": machine}
        own.mkdir(exist_ok=True)
        machines.append(Ranks(main, 1, own, arguments(own), environment=place))
    return machines


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run(function: Callable, arguments: tuple[Any, ...], folder: Path, rank: int, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("RANK", "0"))  # which it reads when it is imported
    torch.set_num_threads(1)
    with open(f"rank_{rank}.log", "w") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        result = function(*arguments)
        Path(f"rank_{rank}.result").write_bytes(pickle.dumps(result))
        if function is main:
            sys.exit(result)
