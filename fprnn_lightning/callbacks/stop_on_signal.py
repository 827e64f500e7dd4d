"""What a run does when it is told to end: SIGTERM (kill, a batch system's limit), SIGUSR1 (SLURM's warning before that)
or SIGINT (Ctrl-C). Training finishes the step it is in on all ranks, saves, and ends with exit code 128 + the signal's
number; `fit --resume auto` goes on from there. A second signal ends the process at once.
"""

import os
import signal
import subprocess
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StoppedBySignal(Exception):
    """A signal has ended the run; the message says which, and where it can go on."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class StopOnSignal(Callback):
    """Saves a checkpoint and raises StoppedBySignal after a signal.

    Args:
        checkpoint: where to save in training; None saves nothing.
        requeue: whether to have SLURM start the job again after SIGUSR1.
    """

    def __init__(self, checkpoint: Path | None, requeue: bool = False) -> None:
        self.checkpoint = checkpoint
        self.requeue = requeue
        self.received = 0
        self.stopping = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not trainer.fit_loop._should_accumulate() and self._is_told(trainer):
            if self.checkpoint:
                trainer.save_checkpoint(self.checkpoint, weights_only=False)
            self.stopping = True  # once what this step logs is written, and validated if that is due

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stopping = self.stopping or (trainer.state.fn == "fit" and self._is_told(trainer))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.stopping = self._is_told(trainer)
        self._stop(trainer)

    def _listen(self) -> None:
        for number in SIGNALS:  # Lightning, which has handlers of its own until now, restores all when it is done
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number

    def _is_told(self, trainer: Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(bool(self.received), all=False)

    def _stop(self, trainer: Trainer) -> None:
        if not self.stopping:
            return
        number = signal.Signals(self.received or signal.SIGTERM)
        done = f"ended by {number.name}"
        if trainer.global_step:
            done += f" after step {trainer.global_step}"
        if self.checkpoint:
            done += f", saved in {self.checkpoint}; the same command with --resume auto goes on from there"
        if self.requeue and number == signal.SIGUSR1 and "SLURM_JOB_ID" in os.environ and trainer.is_global_zero:
            subprocess.run(["scontrol", "requeue", slurm_job()], check=True)
            done += ", and SLURM has been told to start it again"
        raise StoppedBySignal(number, done)


def slurm_job() -> str:
    """The name by which SLURM knows this job, or this task of an array."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]
