"""A training step of every mixer (forward, backward, AdamW) against that of torch's LSTM of equal inner width.

Fixed-point mixers do exactly 16 iterations (a tolerance of 0) under the one-step rule, so that the time is that of the
work and not of how soon it may stop. The rows at the end say what iterations cost in memory.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.channel_mixers.kronecker import Kronecker
from fprnn_lightning.channel_mixers.low_rank import LowRank
from fprnn_lightning.commands.timing import clock_of, keep_freed_memory, medians, name_of, report
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.cores.state_space_dual import StateSpaceDual
from fprnn_lightning.mixers import SequenceMixer
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.solvers import GradientRule, Stopping
from fprnn_lightning.solvers.gradients import Implicit, OneStep, Unrolled

WIDTH = 128
SHAPES = ((64, 64), (256, 16))  # batch, time
ITERATIONS = 16
ONE_STEP = OneStep()


def fixed_point(
    width: int, core=GatedDiagonal, channel_mixer=Householder, iterations=ITERATIONS, gradient: GradientRule = ONE_STEP
) -> FixedPointMixer:
    """A fixed-point mixer that does so many iterations, no fewer."""
    return FixedPointMixer(
        width,
        core=core,
        channel_mixer=channel_mixer,
        stopping=Stopping(tolerance=0.0, share=1.0),
        train_iterations=iterations,
        gradient=gradient,
    )


_dual = partial(StateSpaceDual, head_channels=64)
MIXERS: dict[str, Callable[[int], SequenceMixer]] = {
    "gated_diagonal": DiagonalMixer,
    "mamba": partial(DiagonalMixer, core=SelectiveSSM, convolution=4),
    "mamba2": partial(DiagonalMixer, core=_dual, convolution=4),
    "dense": DenseMixer,
    "fp_rnn": fixed_point,
    "fp_mamba_h": partial(fixed_point, core=SelectiveSSM),
    "fp_mamba_k": partial(fixed_point, core=SelectiveSSM, channel_mixer=Kronecker),
    "fp_mamba_dplr": partial(fixed_point, core=SelectiveSSM, channel_mixer=partial(LowRank, rank=4)),
    "fp_mamba2_h": partial(fixed_point, core=_dual),
    "fp_mamba2_k": partial(fixed_point, core=_dual, channel_mixer=Kronecker),
}
BFLOAT16 = ("fp_rnn", "fp_mamba_h")  # timed with matrix products in bfloat16 too
MEMORY_ITERATIONS = 2, 8, 32


def mixers(output: Path | None = None) -> None:
    """Times a training step of every mixer of width 128, expanded to 256 channels, on a GPU if there is one.

    Args:
        output: CSV file to write: mixer, batch, time, channels, milliseconds, tokens_per_second, peak_megabytes (most
            memory that tensors took during the step, beyond weights, moments and the input), ratio_to_lstm (of times,
            the LSTM in float32 being timed in turn with each mixer).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keep_freed_memory()
    rows = []
    for shape in SHAPES:
        x = torch.randn(*shape, WIDTH, device=device)
        lstm = TrainingStep(LSTMMixer, x)
        rows.append(_row("lstm", lstm, *medians(clock_of(device), lstm), 1.0))
        for name, factory in MIXERS.items():
            for bfloat16 in (False, True) if name in BFLOAT16 else (False,):
                label = f"{name} bfloat16" if bfloat16 else name
                print(f"timing {label} {shape}", file=sys.stderr)
                step = TrainingStep(factory, x, bfloat16)
                seconds, lstm_seconds = medians(clock_of(device), step, lstm)
                rows.append(_row(label, step, seconds, seconds / lstm_seconds))
    for rule, iterations in itertools.product((OneStep(), Implicit(), Unrolled()), MEMORY_ITERATIONS):
        step = TrainingStep(partial(fixed_point, iterations=iterations, gradient=rule), x)
        seconds, lstm_seconds = medians(clock_of(device), step, lstm)
        label = f"fp_rnn {type(rule).__name__}, {iterations} iterations"
        rows.append(_row(label, step, seconds, seconds / lstm_seconds))
    report(f"training step of mixers of width {WIDTH} against torch's LSTM, {name_of(device)}", rows, output)


class TrainingStep:
    """Forward, backward and AdamW of one mixer on the same input every time; the loss is the mean square.

    Args:
        factory: makes the mixer from its width.
        x: input (B, T, width).
        bfloat16: whether matrix products are in bfloat16, by autocast.
    """

    def __init__(self, factory: Callable[[int], SequenceMixer], x: Tensor, bfloat16: bool = False) -> None:
        torch.manual_seed(0)
        self.mixer = factory(x.shape[-1]).to(x.device)
        self.optimizer = torch.optim.AdamW(self.mixer.parameters(), lr=1e-4)
        self.x = x
        self.bfloat16 = bfloat16

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.bfloat16):
            y = self.mixer(self.x)
        y.float().square().mean().backward()
        self.optimizer.step()

    def peak_bytes(self) -> int:
        """Most memory that a step takes beyond what is there before it, once AdamW has its moments."""
        self()
        if self.x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self()
            return torch.cuda.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self()
        changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        return max(itertools.accumulate((event.nbytes() for event in changes), initial=0))


def _row(mixer: str, step: TrainingStep, seconds: float, ratio: float) -> dict[str, object]:
    batch, time, channels = step.x.shape
    return {
        "mixer": mixer,
        "batch": batch,
        "time": time,
        "channels": channels,
        "milliseconds": f"{1e3 * seconds:.2f}",
        "tokens_per_second": f"{batch * time / seconds:.0f}",
        "peak_megabytes": f"{step.peak_bytes() / 1e6:.3f}",
        "ratio_to_lstm": f"{ratio:.2f}",
    }
