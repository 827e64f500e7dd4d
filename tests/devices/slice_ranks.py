"""Processes that hold slices of time: started once, given functions to run together, ended with their tests."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "fprnn_lightning.mixers",
        "fprnn_lightning.model",
        "fprnn_lightning.scan.linear_triton_kernels",
        "fprnn_lightning.scan.selective_triton_kernels",
        "torch._dynamo",  # takes two seconds
    ]
)
LONGEST = 60  # seconds that one function may take


class Ranks:
    """A process group on this machine.

    Args:
        size: processes.
        folder: where they find each other.
        backend: how they communicate, "gloo", or "nccl" with a GPU for each.
    """

    def __init__(self, size: int, folder: Path, backend: str = "gloo") -> None:
        self.size = size
        self._connections, self._processes = [], []
        for rank in range(size):
            here, there = PROCESSES.Pipe()
            process = PROCESSES.Process(
                target=_serve, args=(rank, size, str(folder / "meeting"), backend, there), daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function gives on every rank; it is called with the groups of 1, 2, ... ranks, and the arguments.

        Raises:
            AssertionError: if it fails on a rank, or takes too long; then there are no ranks any more.
        """
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function, arguments)))
        waited, results, end = dict(zip(self._connections, range(self.size), strict=True)), {}, monotonic() + LONGEST
        while waited:
            ready = wait(list(waited), max(0.0, end - monotonic()))
            if not ready:
                self.close()
                raise AssertionError(f"ranks {sorted(waited.values())} have not answered within {LONGEST} s")
            for connection in ready:
                rank = waited.pop(connection)
                try:
                    failure, results[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    failure = "has ended"
                if failure:
                    self.close()
                    raise AssertionError(f"rank {rank}: {failure}")
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()


def _serve(rank: int, size: int, meeting: str, backend: str, connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = timedelta(seconds=LONGEST / 2)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timeout)
    groups = {count: dist.new_group(range(count)) for count in range(1, size)} | {size: dist.group.WORLD}
    while True:
        function, arguments = pickle.loads(connection.recv_bytes())
        try:
            answer = None, function(groups, *arguments)
        except BaseException:
            answer = traceback.format_exc(), None
        connection.send_bytes(pickle.dumps(answer))
