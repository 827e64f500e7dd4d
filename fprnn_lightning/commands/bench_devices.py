"""What training on several processes exchanges and gains, and what that lets one expect of many GPUs.

Bytes are those that one process sends where the exchange goes round a ring of N processes, S being those of the tensor:

    all-reduce 2 S (N-1)/N,   all-gather and reduce-scatter S (N-1)/N, S the whole tensor,   broadcast S

An optimiser step of P weights in float32 so sends 8P (N-1)/N bytes under DDP (all-reduces of the gradients) and
12P (N-1)/N sharded (weights gathered forward and backward, gradients scattered), and some small reductions. Each costs
latencies too: going by trees, as taken here, an all-reduce 2 log2(N) one after the other, a gather or scatter log2(N).

    DDP: an all-reduce of the first 1 MiB of gradients, and one of each 25 MiB after it
    sharded, L blocks: 2L + 1 all-gathers, L + 1 reduce-scatters
"""

import logging
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from fprnn_lightning.callbacks import GradientNorm, NonFiniteGuard, SolverReport, StopOnSignal
from fprnn_lightning.commands.bench_mixers import fixed_point
from fprnn_lightning.commands.timing import report
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.tasks.base import count_scored
from fprnn_lightning.training import FixedLength, SequenceLearner, Sharded, WarmupConstant

VOCABULARY = 60  # of A5
MIXERS = {"fp_rnn": fixed_point, "dense": DenseMixer}
WARMUP, COUNTED, TIMED = 3, 10, 15  # steps; values are logged every tenth
STRATEGIES: dict[str, Callable[[int], Any]] = {  # for so many processes
    "DDP": lambda ranks: "ddp",
    "sharded": lambda ranks: Sharded(),
    "sliced": lambda ranks: Sharded(slices=ranks),
}
PATIENCE = 600.0  # seconds in which a process must have an answer
NAMES = {
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::broadcast_": "broadcast",
    "c10d::barrier": "barrier",
    "c10d::send": "send",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
}
COLLECTIVES = tuple(dict.fromkeys(NAMES.values()))

FLOAT32 = 4  # bytes
SMALL = 7  # exchanges of a step that carry a few bytes: three reductions, a barrier before each, and a broadcast
PROCESSES = (8, 64, 1024)
BACKWARD_SHARE = 2 / 3  # of a step's computation
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes of gradients that DDP reduces at once


class Link(NamedTuple):
    """What GPUs exchange over; an input of the cost model.

    Args:
        bandwidth: bytes per second of one process, each way.
        latency: seconds of a message.
    """

    bandwidth: float
    latency: float


LINKS = {"NVLink": Link(450e9, 3e-6), "InfiniBand": Link(50e9, 5e-6), "10 GbE": Link(1.25e9, 30e-6)}


class Workload(NamedTuple):
    """A model and the computation of one optimiser step of it on one GPU.

    Args:
        parameters: numbers that are learnt.
        blocks: of the model, each of which is gathered and scattered for itself if sharded.
        compute_seconds: forward, backward and optimiser; an input of the cost model, not measured.
    """

    parameters: float
    blocks: int
    compute_seconds: float


WORKLOADS = (Workload(125e6, 12, 0.1), Workload(0.4e6, 1, 0.01))


def devices(
    width: int = 128,
    layers: int = 1,
    batch: int = 128,
    time: int = 16,
    processes: int = 2,
    output: Path | None = None,
) -> None:
    """Counts what an optimiser step exchanges under each strategy, and times it on CPU processes of one thread each.

    The steps are those of `fit`, with the callbacks that every run has, in float32; fp_rnn does 16 iterations. Counts
    are means over ten steps, of which one is logged. The batch is the same for all numbers of processes, each of
    which gets its share: of the sequences, or, sliced, of the time of each. A second table says what the bytes let one
    expect of many GPUs.

    Args:
        width: Channels of the model.
        layers: Number of blocks.
        batch: Sequences of all processes together.
        time: Tokens of a sequence.
        processes: How many train together.
        output: CSV file to write: mixer, strategy, processes, parameters, all_reduce, all_gather, reduce_scatter,
            broadcast, barrier and send (exchanges per step), kilobytes (sent by one process per step), milliseconds
            (per step), speedup (over one process).

    Raises:
        ValueError: If the processes cannot share the batch or the time, or fail.
    """
    if processes < 2 or batch % processes:
        raise ValueError(f"processes is {processes}, must be at least 2 and divide the batch, which is {batch}")
    if time < processes:
        raise ValueError(f"processes is {processes}, must be at most as many as there are tokens, {time}")
    job = partial(train_all, width=width, layers=layers, batch=batch, time=time)
    alone, together = (run_together(job, ranks) for ranks in (1, processes))
    rows = []
    for mixer in MIXERS:
        (one,) = alone[mixer]
        rows += [_row(mixer, found, one.seconds) for found in (one, *together[mixer])]
    report(f"an optimiser step of width {width} on processes of one CPU thread", rows, output)
    report("share of the time in which GPUs would compute", cost_table(), None)


class Exchange(NamedTuple):
    """One exchange: its name and the bytes of the whole tensor."""

    name: str
    size: int

    def sent(self, processes: int) -> float:
        """Bytes that one of so many processes sends, round a ring."""
        share = (processes - 1) / processes
        return self.size * {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share}.get(self.name, 1.0)


class Found(NamedTuple):
    """What one training of one mixer has shown.

    Args:
        strategy: how processes shared it.
        processes: how many.
        parameters: of the model.
        exchanges: in all counted steps.
        seconds: the median over the timed steps.
    """

    strategy: str
    processes: int
    parameters: int
    exchanges: list[Exchange]
    seconds: float


class Exchanges(TorchDispatchMode):
    """Notes the exchanges that this process takes part in, those of DDP's and FSDP's own among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Exchange] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # what it does on plain tensors comes here next
        name = NAMES.get(function.name().partition(".")[0])
        result = function(*args, **(kwargs or {}))
        if name:
            self.seen.append(Exchange(name, max(map(_bytes, (*args, result)))))
        return result


def _bytes(part: Any) -> int:
    """Of a tensor, or of all in a list, as where what is gathered is in parts."""
    return sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, Tensor))


class Meter(Callback):
    """Counts the exchanges of some steps, and times others."""

    def __init__(self) -> None:
        self.exchanges = Exchanges()
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == WARMUP:
            self.exchanges.__enter__()
        elif trainer.global_step == WARMUP + COUNTED:
            self.exchanges.__exit__(None, None, None)
        if trainer.global_step >= WARMUP + COUNTED:
            self.ends.append(time.perf_counter())


class Tokens(IterableDataset):
    """One of equal shares of random batches without end: tokens and labels (sequences, length), and what all score."""

    def __init__(self, share: int, shares: int, sequences: int, length: int) -> None:
        self.share = share
        self.shares = shares
        self.shape = 2, sequences // shares, length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.share)
        while True:
            tokens, targets = torch.randint(VOCABULARY, self.shape, generator=generator).unbind()
            yield tokens, targets, self.shares * count_scored(targets)


def train_all(ranks: int, width: int, layers: int, batch: int, time: int) -> dict[str, list[Found]]:
    """Trains every mixer under every strategy that it can have, as one of so many processes."""
    strategies = STRATEGIES if ranks > 1 else {"one process": lambda ranks: "auto"}
    rank = int(os.environ["RANK"])
    found: dict[str, list[Found]] = {mixer: [] for mixer in MIXERS}
    for mixer, factory in MIXERS.items():
        for strategy, make in strategies.items():
            if strategy == "sliced" and not factory(width).can_be_sliced:
                continue
            if rank == 0:
                print(f"training {mixer}, {strategy}, processes: {ranks}", file=sys.stderr)
            course = {"curriculum": FixedLength(time), "schedule": WarmupConstant(1)}
            learner = SequenceLearner(factory, VOCABULARY, width, layers, learning_rate=1e-4, **course)
            parameters = sum(parameter.numel() for parameter in learner.parameters())
            meter = Meter()
            trainer = Trainer(
                accelerator="cpu",
                devices=ranks,
                strategy=make(ranks),
                max_steps=WARMUP + COUNTED + TIMED,
                gradient_clip_val=1.0,
                limit_val_batches=0,
                callbacks=[GradientNorm(), SolverReport(), NonFiniteGuard(), StopOnSignal(None), meter],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                log_every_n_steps=10,
            )
            tokens = Tokens(*((0, 1) if strategy == "sliced" else (rank, ranks)), batch, time)
            trainer.fit(learner, DataLoader(tokens, batch_size=None))
            steps = [end - start for start, end in zip(meter.ends, meter.ends[1:], strict=False)]
            found[mixer].append(Found(strategy, ranks, parameters, meter.exchanges.seen, statistics.median(steps)))
    return found


def run_together(job: Callable[[int], Any], ranks: int) -> Any:
    """Calls job(ranks) in so many processes of one thread each, as torchrun would, and returns what the first returns.

    Raises:
        ValueError: if one fails, or takes too long.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once for all
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"TORCHELASTIC_RUN_ID": "bench", "OMP_NUM_THREADS": "1"}  # as torchrun would set them
    receiver, sender = context.Pipe(duplex=False)
    processes = []
    for rank in range(ranks):
        variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_work, args=(job, ranks, variables, sender if rank == 0 else None)))
        processes[-1].start()
    sender.close()
    try:
        if not receiver.poll(PATIENCE):
            raise ValueError(f"{ranks} processes have not trained within {PATIENCE:g} seconds")
        return receiver.recv()
    except EOFError:
        raise ValueError(f"one of {ranks} processes has failed, its message is above") from None
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def exchanged_bytes(strategy: str, parameters: float, processes: int) -> float:
    """Bytes that one process sends per optimiser step for weights and gradients in float32; sliced as sharded."""
    passes = ("all_reduce",) if strategy == "DDP" else ("all_gather", "all_gather", "reduce_scatter")
    return sum(Exchange(name, FLOAT32 * parameters).sent(processes) for name in passes)


def buckets(parameters: float) -> int:
    """All-reduces of float32 gradients per optimiser step under DDP; as if a bucket could end within a tensor."""
    return 1 + math.ceil(max(0.0, FLOAT32 * parameters - FIRST_BUCKET) / BUCKET)


def latencies(strategy: str, parameters: float, blocks: int, processes: int) -> float:
    """Messages that an optimiser step waits for one after the other as weights and gradients go, by trees."""
    depth = math.log2(processes)
    if strategy == "DDP":
        return 2 * depth * buckets(parameters)
    return depth * (2 * blocks + 1 + blocks + 1)


def small_seconds(processes: int, latency: float) -> float:
    """Time per step of the small exchanges, each up a tree of processes and down again; all wait for them."""
    return SMALL * 2 * math.log2(processes) * latency


def efficiency(compute: float, exchange: float, small: float = 0.0, hidden: float = 0.0) -> float:
    """compute / (compute + exchange beyond what is hidden + small exchanges), times of a step: 1 if none ever waits."""
    return compute / (compute + max(0.0, exchange - hidden) + small)


def cost_table() -> list[dict[str, object]]:
    """Expected efficiency by model, strategy, processes and link: with no exchange hidden, and with all that fits.

    What fits behind the computation is as long as the backward pass under DDP, as long as the step if sharded.
    """
    rows = []
    for workload in WORKLOADS:
        for strategy in ("DDP", "sharded"):
            for processes in PROCESSES:
                sent = exchanged_bytes(strategy, workload.parameters, processes)
                messages = latencies(strategy, workload.parameters, workload.blocks, processes)
                row: dict[str, object] = {
                    "parameters": f"{workload.parameters / 1e6:g} M",
                    "blocks": workload.blocks,
                    "compute": f"{1e3 * workload.compute_seconds:g} ms",
                    "strategy": strategy,
                    "GPUs": processes,
                    "sent": f"{sent / 1e6:.1f} MB",
                    "messages": f"{messages:.0f}",
                }
                hidden = workload.compute_seconds * (BACKWARD_SHARE if strategy == "DDP" else 1.0)
                for name, link in LINKS.items():
                    exchange = sent / link.bandwidth + messages * link.latency
                    seconds = workload.compute_seconds, exchange, small_seconds(processes, link.latency)
                    row[name] = f"{100 * efficiency(*seconds):.0f}–{100 * efficiency(*seconds, hidden):.0f} %"
                rows.append(row)
    return rows


def _work(job: Callable[[int], Any], ranks: int, environment: dict[str, str], sender: Connection | None) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    result = job(ranks)
    if sender is not None:
        sender.send(result)


def _row(mixer: str, found: Found, alone: float) -> dict[str, object]:
    calls = Counter(exchange.name for exchange in found.exchanges)
    sent = sum(exchange.sent(found.processes) for exchange in found.exchanges) / COUNTED
    return {
        "mixer": mixer,
        "strategy": found.strategy,
        "processes": found.processes,
        "parameters": found.parameters,
        **{name: f"{calls[name] / COUNTED:.1f}" for name in COLLECTIVES},
        "kilobytes": f"{sent / 1e3:.1f}",
        "milliseconds": f"{1e3 * found.seconds:.2f}",
        "speedup": f"{alone / found.seconds:.2f}",
    }
