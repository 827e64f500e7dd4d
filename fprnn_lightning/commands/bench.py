"""Timings of the two things that must not wait: the scans against the memory bus, and the making of batches.

gigabytes_per_second = the fewest bytes that must move / median time, whatever a backend really moves; ratio is that
over the same figure of torch.add on the CPU (reads two arrays, writes one), of a copy on a GPU, timed in turn with it.
"""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fprnn_lightning.commands.bench_devices import devices as devices
from fprnn_lightning.commands.bench_mixers import mixers as mixers
from fprnn_lightning.commands.bench_solver import solver as solver
from fprnn_lightning.commands.timing import (
    clock_of,
    cpu_clock,
    gpu_clock,
    keep_freed_memory,
    medians,
    name_of,
    report,
)
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.model import SequenceModel
from fprnn_lightning.scan import linear_scan, resolve_backend, selective_scan, state_space_dual
from fprnn_lightning.scan.backends import Backend
from fprnn_lightning.sentences import concrete_subclasses
from fprnn_lightning.tasks import SequenceTask

HEAD = 64  # channels of a head of state_space_dual, as in Mamba-2
TRAINING_BATCH = (128, 16)  # sequences and tokens, as in the quickstart


def scan(backend: Backend = "auto", output: Path | None = None) -> None:
    """Times the scans in float32, forward and with backward, on a GPU if there is one, else on the CPU.

    Counted as moved: forward reads every input once and writes the states of linear_scan or the y of the others, all
    of the size of x. Backward reads the gradient to that and the inputs (linear_scan its states for the drive), and
    writes the gradient to every input. The states between chunks that backward starts from are not counted: they
    could be computed again. So linear_scan moves 3 arrays forward and 8 with backward.

    What bounds selective_scan on a CPU is no memory but exponentials, one for each state of each channel at each step,
    and again in backward, since states are not kept. To hold that against, the row torch.exp is the time in which torch
    computes so many (as for forward alone) from the cache, on all threads.

    On the CPU, every call allocates its results, those of torch.add too, from memory that the process already has.
    Decays of linear_scan are uniform in (0, 1); decays close to 1 take up to twice as long where sequences are cut in
    time, that is where the cores do not divide the batch.

    Args:
        backend: What to time; "auto" is the fastest that can run, and on the CPU the loop over time (reference) too.
            "cpu" is timed on the CPU even if there is a GPU.
        output: CSV file to write: op, backend, batch, time, channels, states (of each channel; none where a channel is
            the state), direction, milliseconds, gigabytes_per_second, ratio.

    Raises:
        ValueError: If the backend cannot run here.
    """
    on_gpu = backend != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    probe = torch.empty(0, device=device)
    wanted = (backend,) if on_gpu or backend != "auto" else ("auto", "reference")
    backends = dict.fromkeys(resolve_backend(probe, each) for each in wanted)
    keep_freed_memory()
    rows: list[dict[str, object]] = []
    for case, shape in gpu_cases() if on_gpu else CPU_CASES:
        with device:
            function, inputs = case(*shape)
        for each in backends:
            print(f"timing {function.__name__} {shape} {each}", file=sys.stderr)
            rows += _scan_rows(function, inputs, shape, each)
        if case is selective_case and not on_gpu:
            rows.append(_exponentials_row(shape))
    report(f"scans against {'a copy' if on_gpu else 'torch.add'}, {name_of(device)}", rows, output)


def data(output: Path | None = None) -> None:
    """Times the making of training batches of every task at length 512, and how fast training uses them, on one core.

    Training is forward, backward and AdamW of the quickstart's model (one dense mixer, width 128, the vocabulary of the
    task) on batches of 128 sequences of 16 tokens, on a GPU if there is one. Tasks that need files are left out.

    Args:
        output: CSV file to write: task, length, tokens_per_second (padding counts: a model has to read it),
            training_tokens_per_second, and ratio, the first over the second.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [_data_row(task(train_length=512)) for task in concrete_subclasses(SequenceTask) if not _needs(task)]
    finally:
        torch.set_num_threads(threads)
    report("making of training batches against training, on one core", rows, output)


def linear_case(*shape: int) -> tuple[Callable, list[Tensor]]:
    """linear_scan of shape (B, T, D): decay and drive."""
    return linear_scan, [torch.rand(shape), torch.randn(shape)]


def selective_case(batch: int, time: int, channels: int, states: int) -> tuple[Callable, list[Tensor]]:
    """selective_scan as Mamba begins: decay rates 1 to N, steps of up to 0.1."""
    x, dt = torch.randn(batch, time, channels), 0.1 * torch.rand(batch, time, channels)
    A = -torch.arange(1.0, states + 1).repeat(channels, 1)
    return selective_scan, [x, dt, A, *torch.randn(2, batch, time, states).unbind(), torch.ones(channels)]


def dual_case(batch: int, time: int, channels: int, states: int) -> tuple[Callable, list[Tensor]]:
    """state_space_dual as Mamba-2 begins: heads of 64 channels with decay rates from 1 to 16, steps of up to 0.1."""
    heads = channels // HEAD
    x, dt = torch.randn(batch, time, heads, HEAD), 0.1 * torch.rand(batch, time, heads)
    A = -torch.empty(heads).uniform_(1, 16)
    return state_space_dual, [x, dt, A, *torch.randn(2, batch, time, states).unbind(), torch.ones(heads)]


CPU_CASES = (  # shapes are batch, time, channels, states
    (linear_case, (64, 16, 256)),
    (linear_case, (64, 256, 256)),
    (linear_case, (8, 2048, 256)),
    (linear_case, (1, 16384, 256)),
    (selective_case, (8, 1024, 256, 16)),
    (dual_case, (2, 1024, 256, 64)),
)


def gpu_cases() -> Iterator[tuple[Callable, tuple[int, ...]]]:
    """linear_scan on 2^27 numbers, fewer if memory is short, in short to long sequences; the others as in training."""
    numbers, free = 2**27, torch.cuda.mem_get_info()[0]
    while 12 * 4 * numbers > free:  # 12 arrays of float32
        numbers //= 2
    for length in (128, 1024, 8192, 65536):
        yield linear_case, (numbers // (512 * length), length, 512)
    yield selective_case, (8, 2048, 2048, 16)
    yield dual_case, (8, 2048, 2048, 128)


def _needs(task: type[SequenceTask]) -> bool:
    """Whether a task has options without a default."""
    options = inspect.signature(task).parameters.values()
    return any(option.default is option.empty and option.kind is not option.VAR_KEYWORD for option in options)


def _data_row(task: SequenceTask) -> dict[str, object]:
    print(f"timing {task.name}", file=sys.stderr)
    indices = itertools.count()
    (seconds,) = medians(cpu_clock, lambda: task.batch("train", next(indices)))
    made, used = task.batch_size * task.train_length / seconds, _training_rate(task.vocab_size)
    return {
        "task": task.name,
        "length": task.train_length,
        "tokens_per_second": f"{made:.0f}",
        "training_tokens_per_second": f"{used:.0f}",
        "ratio": f"{made / used:.0f}",
    }


def _training_rate(vocab_size: int) -> float:
    """Tokens per second of training steps on random tokens."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = SequenceModel(vocab_size, DenseMixer, width=128)
        tokens = torch.randint(vocab_size, TRAINING_BATCH)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    (seconds,) = medians(clock_of(device), step)
    return tokens.numel() / seconds


def _scan_rows(
    function: Callable, inputs: list[Tensor], shape: tuple[int, ...], backend: str
) -> Iterator[dict[str, object]]:
    x, read = inputs[0].detach(), sum(tensor.nbytes for tensor in inputs)
    if x.is_cuda:
        clock, yardstick, yardstick_bytes = gpu_clock, partial(torch.clone, x), 2 * x.nbytes
    else:
        clock, yardstick, yardstick_bytes = cpu_clock, partial(torch.add, x, torch.randn_like(x)), 3 * x.nbytes
    leaves, grad = [tensor.requires_grad_() for tensor in inputs], torch.randn_like(x)
    for direction, moved, call in (
        ("forward", read + x.nbytes, partial(function, *leaves, backend=backend)),
        ("forward+backward", 3 * read + 2 * x.nbytes, partial(_forward_backward, function, leaves, grad, backend)),
    ):
        with torch.set_grad_enabled(direction != "forward"):
            seconds, yardstick_seconds = medians(clock, call, yardstick)
        bandwidth = moved / seconds
        ratio = bandwidth / (yardstick_bytes / yardstick_seconds)
        yield _row(function.__name__, backend, shape, direction, seconds, f"{bandwidth / 1e9:.2f}", f"{ratio:.4f}")


def _exponentials_row(shape: tuple[int, ...]) -> dict[str, object]:
    """Exponentials are computed 2^18 at a time, few enough for the cache and many enough for all threads."""
    numbers, size = torch.randn(2**18), torch.Size(shape).numel()
    (seconds,) = medians(cpu_clock, partial(torch.exp, numbers, out=torch.empty_like(numbers)))
    return _row("torch.exp", "torch", shape, "forward", seconds * size / len(numbers), "", "")


def _row(op, backend, shape, direction, seconds, bandwidth, ratio) -> dict[str, object]:
    batch, time, channels, states = (*shape, "")[:4]
    return {
        "op": op,
        "backend": backend,
        "batch": batch,
        "time": time,
        "channels": channels,
        "states": states,
        "direction": direction,
        "milliseconds": f"{1e3 * seconds:.4f}",
        "gigabytes_per_second": bandwidth,
        "ratio": ratio,
    }


def _forward_backward(function: Callable, leaves: list[Tensor], grad: Tensor, backend: str) -> tuple[Tensor, ...]:
    result = function(*leaves, backend=backend)
    return torch.autograd.grad(result if isinstance(result, Tensor) else result[0], leaves, grad)
