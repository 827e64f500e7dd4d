"""Timings of the two things that must not wait: the linear scans against the memory bus, and the making of batches.

gigabytes_per_second = the fewest bytes that must move / median time, whatever a backend really moves; ratio is that
over the same figure of torch.add, which reads two arrays and writes one, timed in turn with it.
"""

import contextlib
import csv
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fprnn_lightning.scan import linear_scan
from fprnn_lightning.tasks import WordProblem

SHAPES = ((64, 16, 256), (64, 256, 256), (8, 2048, 256), (1, 16384, 256))  # batch, time, channels
BACKENDS = ("reference", "cpu")
SECONDS = 1.0  # per timing


def scan(output: Path | None = None) -> None:
    """Times linear_scan on the CPU, in float32, against torch.add on the same arrays.

    Counted as moved, in arrays of the size of the drive: forward 3 (reads decay and drive, writes states), and
    forward+backward 8 (then reads the gradient, decay and states, writes the gradients to decay and drive). torch.add
    moves 3, so forward+backward is held against 8/3 of its time. Every call allocates its results, those of torch.add
    too, from memory that the process already has. Decays are uniform in (0, 1); decays close to 1 take up to twice as
    long where sequences are cut in time, that is where the cores do not divide the batch.

    Args:
        output: CSV file to write: op, backend, batch, time, channels, direction, milliseconds, gigabytes_per_second,
            ratio.
    """
    _keep_freed_memory()
    rows = []
    for shape in SHAPES:
        decay, drive, grad = torch.rand(shape), torch.randn(shape), torch.randn(shape)
        add = partial(torch.add, decay, drive)
        leaves = decay.clone().requires_grad_(), drive.clone().requires_grad_()
        for backend in BACKENDS:
            for direction, arrays, call in (
                ("forward", 3, partial(linear_scan, decay, drive, backend=backend)),
                ("forward+backward", 8, partial(_forward_backward, leaves, grad, backend)),
            ):
                with torch.set_grad_enabled(direction != "forward"):
                    seconds, add_seconds = _medians(call, add)
                rows.append(
                    {
                        "op": "linear_scan",
                        "backend": backend,
                        **dict(zip(("batch", "time", "channels"), shape, strict=True)),
                        "direction": direction,
                        "milliseconds": f"{1e3 * seconds:.4f}",
                        "gigabytes_per_second": f"{arrays * drive.nbytes / seconds / 1e9:.2f}",
                        "ratio": f"{arrays / 3 * add_seconds / seconds:.3f}",
                    }
                )
    _report(f"linear_scan against torch.add, {torch.get_num_threads()} threads", rows, output)


def data(output: Path | None = None) -> None:
    """Times the making of training batches of the A5 word problem at length 512, on one core.

    Args:
        output: CSV file to write: task, length, tokens_per_second.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task, index = WordProblem(group="A5", train_length=512), 0

    def batch():
        nonlocal index
        index += 1
        return task.batch("train", index)

    try:
        (seconds,) = _medians(batch)
    finally:
        torch.set_num_threads(threads)
    tokens, _ = batch()
    rows = [{"task": task.name, "length": tokens.shape[1], "tokens_per_second": f"{tokens.numel() / seconds:.0f}"}]
    _report("word problems on one core", rows, output)


def _keep_freed_memory() -> None:
    """Stops glibc from returning memory to the system, since mapping it again takes longer than a scan."""
    with contextlib.suppress(AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no separate mapping for large blocks
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _forward_backward(leaves: tuple[Tensor, Tensor], grad: Tensor, backend: str) -> tuple[Tensor, ...]:
    return torch.autograd.grad(linear_scan(*leaves, backend=backend), leaves, grad)


def _medians(*calls: Callable[[], object]) -> list[float]:
    """The median seconds of each call, the calls taking turns after two rounds to warm up."""
    rounds: list[list[float]] = []
    end = time.perf_counter() + SECONDS
    while len(rounds) < 7 or time.perf_counter() < end:
        rounds.append([_seconds(call) for call in calls])
    return [statistics.median(seconds) for seconds in zip(*rounds[2:], strict=True)]


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = call()  # kept until the clock has stopped: freeing it is not part of the time
    seconds = time.perf_counter() - start
    del result
    return seconds


def _report(title: str, rows: Sequence[dict[str, object]], output: Path | None) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, no_wrap=True, overflow="ignore")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=max(Console().width, 120)).print(table)
    if output is not None:
        with open(output, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
