"""Progress over the optimiser steps of an endless stream: a bar in a terminal, else a plain line every few seconds; and
a line after each validation and while testing. It shows what has been logged last, so it comes after the callbacks
that log.
"""

import sys
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm import tqdm


class Progress(TQDMProgressBar):
    """Loss, accuracy, length, solver iterations (mean over the layers) and tokens per second on the way to `max_steps`.

    Args:
        refresh_rate: steps between updates of the bar; 0 hides bar and lines.
        seconds: between plain lines.
    """

    BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

    def __init__(self, refresh_rate: int = 10, seconds: float = 10.0) -> None:
        super().__init__(refresh_rate)
        self.seconds = seconds
        self.logged_step = 0
        self.shown_step = 0
        self.shown_at = -float("inf")

    @property
    def is_disabled(self) -> bool:
        """Whether no bar is drawn."""
        return super().is_disabled or not sys.stdout.isatty()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
        """What is shown beside the bar, as text; what has not been logged is left out."""
        logged = trainer.callback_metrics
        iterations = [value for name, value in logged.items() if name.startswith("solver/") and "/iterations" in name]
        shown = {
            "loss": ("{:.3f}", logged.get("train/loss")),
            "accuracy": ("{:.3f}", logged.get("train/token_accuracy")),
            "length": ("{:.0f}", logged.get("train/length")),
            "iterations": ("{:.1f}", torch.stack(iterations).mean() if iterations else None),
            "tokens/s": ("{:,.0f}", logged.get("train/tokens_per_second")),
        }
        return {name: form.format(value.item()) for name, (form, value) in shown.items() if value is not None}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.train_progress_bar.reset(trainer.max_steps if trainer.max_steps > 0 else None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer._logger_connector.should_update_logs:
            self.logged_step = trainer.global_step
        if self.is_disabled:
            due = self.logged_step == trainer.global_step and monotonic() - self.shown_at >= self.seconds
        else:
            due = trainer.global_step % self.refresh_rate == 0
        if due:
            self._show(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            logged = trainer.callback_metrics
            accuracies = [
                f"{logged[f'validation/sequence_accuracy_{length}'].item():.3f} at {length}"
                for length in pl_module.validation_accuracy.lengths
            ]
            loss = f"loss {logged['validation/loss'].item():.3f}"
            self._say(
                f"validation after step {trainer.global_step}: {loss}, whole sequences right {', '.join(accuracies)}"
            )

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_test_start(trainer, pl_module)
        self._say(f"testing at lengths up to {pl_module.test_accuracy.lengths[-1]} · {trainer.default_root_dir}")
        self.shown_at = monotonic()

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        super().on_test_batch_end(trainer, pl_module, outputs, batch, batch_idx, *args)
        if self.is_disabled and monotonic() - self.shown_at >= self.seconds:
            self._say(f"tested on {batch_idx + 1} batches")
            self.shown_at = monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.logged_step == trainer.global_step:
            self._show(trainer, pl_module)
        super().on_train_end()

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, last, metrics = trainer.global_step, trainer.max_steps, self.get_metrics(trainer, pl_module)
        if metrics and step > self.shown_step:
            self.train_progress_bar.n = step
            self.train_progress_bar.set_postfix(metrics)
            if self.is_disabled:
                text = "  ".join(f"{name} {value}" for name, value in metrics.items())
                self._say(f"step {step}{f'/{last}' if last > 0 else ''}  {text}")
            self.shown_step, self.shown_at = step, monotonic()

    def _say(self, line: str) -> None:
        if self.is_enabled:
            tqdm.write(line)
            sys.stdout.flush()
