"""How things are timed: the median of many calls, those that are compared taking turns; and how timings are shown."""

import contextlib
import csv
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

SECONDS = 1.0  # per timing


def cpu_clock(call: Callable[[], object]) -> Callable[[], float]:
    """Runs a call; the clock can then be read, in seconds."""
    start = time.perf_counter()
    result = call()  # kept until the clock has stopped: freeing it is not part of the time
    seconds = time.perf_counter() - start
    del result
    return lambda: seconds


def gpu_clock(call: Callable[[], object]) -> Callable[[], float]:
    """Queues a call; the clock is read once the GPU is done, so that it never waits for Python between calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()

    def read() -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return read


def clock_of(device: torch.device) -> Callable:
    """The clock for calls on a device."""
    return gpu_clock if device.type == "cuda" else cpu_clock


def name_of(device: torch.device) -> str:
    """What a device is called in a title."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def medians(clock: Callable, *calls: Callable[[], object]) -> list[float]:
    """The median seconds of each call, the calls taking turns after two rounds to warm up."""
    for call in calls * 2:
        clock(call)()
    rounds: list[list[Callable[[], float]]] = []
    end = time.perf_counter() + SECONDS
    while len(rounds) < 3 or time.perf_counter() < end:
        rounds.append([clock(call) for call in calls])
    return [statistics.median(read() for read in clocks) for clocks in zip(*rounds, strict=True)]


def keep_freed_memory() -> None:
    """Stops glibc from returning memory to the system, since mapping it again takes longer than a scan."""
    with contextlib.suppress(AttributeError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no separate mapping for large blocks
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def report(title: str, rows: Sequence[dict[str, object]], output: Path | None) -> None:
    """Prints rows of one set of columns as a table, and writes them to a CSV file if one is wanted."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, no_wrap=True, overflow="ignore")
    for row in rows:
        table.add_row(*map(str, row.values()))
    full_width = Console(width=1000).measure(table).maximum
    Console(width=max(Console().width, full_width)).print(table)
    if output is not None:
        with open(output, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
