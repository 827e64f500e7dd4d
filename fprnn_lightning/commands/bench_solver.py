"""Timings of one iteration of the fixed-point mixer: fused, composed of PyTorch's operations, and what bounds both."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fprnn_lightning.commands.timing import clock_of, keep_freed_memory, medians, name_of, report
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.fused_step import fused_step
from fprnn_lightning.mixers.recurrent import shift
from fprnn_lightning.solvers.items import SEQUENCES

SHAPE = 64, 128, 256  # batch, time, channels


def solver(output: Path | None = None) -> None:
    """Times one iteration of FP-RNN with Householder's reflections in float32, on a GPU if there is one.

    An iteration is f(y) and its relative change, without gradient. Its one matrix product, V y, is timed alone; all
    the rest is one kernel where it is fused and some forty operations where it is composed. What bounds the rest is
    memory: raw terms, V y, x and y must be read and f(y) written, at the bandwidth of torch.add (on a GPU too).

    Args:
        output: CSV file to write: measure, batch, time, channels, milliseconds, ratio. The ratio is to the memory
            bound, but in the rows fused_over_eager (without the product) and fused_over_eager_with_product that of
            the composed iteration's time to the fused one's, whose milliseconds are given.

    Raises:
        ValueError: If there is no kernel for this machine.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keep_freed_memory()
    with device, torch.no_grad():
        milliseconds = _time_iteration()
    bound = milliseconds["memory_bound"]
    rows = [_row(measure, time, time / bound) for measure, time in milliseconds.items()]
    for part in ("", "_with_product"):
        fused = milliseconds[f"fused{part}"]
        rows.append(_row(f"fused_over_eager{part}", fused, milliseconds[f"composed{part}"] / fused))
    report(f"one iteration of the fixed-point mixer, {name_of(device)}", rows, output)


def _time_iteration() -> dict[str, float]:
    mixer = FixedPointMixer(SHAPE[-1], expand=1)
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    raw, read_terms = mixer.terms.from_input(x), mixer.terms.read
    product = read_terms(y)
    step = fused_step(mixer, mixer.solver, x, raw, torch.zeros_like(x), SEQUENCES)
    if step is None:
        raise ValueError("bench solver: there is no fused iteration here, it needs numba on a CPU, Triton on a GPU.")
    read = step.read(y)

    def composed(read: Callable[[Tensor], Tensor]) -> Tensor:
        mixer.terms.read = read
        gates, q = mixer.gates_and_mixing(x, raw, shift(mixer.seen(y, x)))
        f_y, _ = mixer.core.sequence_pass(gates, mixer.residual(gates, q, y))
        return SEQUENCES.change(y, f_y)

    calls = {
        "torch.add": partial(torch.add, x, y),
        "matrix_product": lambda: step.read(y),
        "fused": lambda: step.measure(y, step.advance(y, read)),
        "fused_with_product": lambda: step.measure(y, step(y)),
        "composed": lambda: composed(lambda _: product),
        "composed_with_product": lambda: composed(read_terms),
    }
    seconds = medians(clock_of(x.device), *calls.values())
    milliseconds = dict(zip(calls, (1e3 * each for each in seconds), strict=True))
    moved = 2 * raw.nbytes + 3 * x.nbytes
    return {"memory_bound": milliseconds["torch.add"] * moved / (3 * x.nbytes)} | milliseconds


def _row(measure: str, milliseconds: float, ratio: float) -> dict[str, object]:
    batch, time, channels = SHAPE
    return {
        "measure": measure,
        "batch": batch,
        "time": time,
        "channels": channels,
        "milliseconds": f"{milliseconds:.4f}",
        "ratio": f"{ratio:.4f}",
    }
