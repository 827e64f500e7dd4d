"""Tokens trained on per second, over the last optimiser steps and all ranks, as `train/tokens_per_second`. All batches
of an accumulated step count, at the lengths to which the curriculum cuts them. Validation does not: the window starts
anew after it, and where a run is resumed.
"""

from collections import deque
from time import perf_counter
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Throughput(Callback):
    """Logs `train/tokens_per_second`.

    Args:
        window: optimiser steps to average over.
    """

    def __init__(self, window: int = 50) -> None:
        if window < 1:
            raise ValueError(f"Throughput: window is {window}, must be at least 1")
        self.steps = deque(maxlen=window + 1)  # seconds at the end of a step, tokens of the step
        self.tokens = 0  # of the step so far
        self.step = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.steps:
            self.steps.append((perf_counter(), 0))
            self.tokens, self.step = 0, trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: dict[str, Any], batch: Any, batch_idx: int
    ) -> None:
        self.tokens += outputs["tokens"] * trainer.world_size
        if trainer.global_step == self.step:  # more batches come before the optimiser's step
            return
        self.steps.append((perf_counter(), self.tokens))
        self.tokens, self.step = 0, trainer.global_step
        if trainer._logger_connector.should_update_logs:
            (started, before), (ended, _) = self.steps[0], self.steps[-1]
            tokens = sum(tokens for _, tokens in self.steps) - before
            pl_module.log("train/tokens_per_second", tokens / (ended - started))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps.clear()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.steps.clear()
