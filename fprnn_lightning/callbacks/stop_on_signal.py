"""What a run does when it is told to end: SIGTERM (kill, a batch system's limit), SIGUSR1 (SLURM's warning before that)
or SIGINT (Ctrl-C). Training finishes the step it is in on all ranks, saves, and ends with exit code 128 + the signal's
number; `fit --resume auto` goes on from there. What only measures ends after its batch. Signals count from the set-up
on, also between a fit and its test, and whichever rank they reach. A second signal ends the process at once.
"""

import os
import signal
import subprocess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StoppedBySignal(Exception):
    """A signal has ended the run; the message, which only the first rank has, says which, and where it can go on."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


class StopOnSignal(Callback):
    """Saves a checkpoint and raises StoppedBySignal after a signal; it listens until `restore`.

    Args:
        checkpoint: where to save in training; None saves nothing.
        requeue: whether to have SLURM start the job again after SIGUSR1.
    """

    def __init__(self, checkpoint: Path | None, requeue: bool = False) -> None:
        self.checkpoint = checkpoint
        self.requeue = requeue
        self.received = 0
        self.agreed = 0  # by all ranks; ends the run once what the step logs is written, and validated if that is due
        self.before: dict[signal.Signals, Any] = {}  # handlers

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._listen()
        trainer._signal_connector.register_signal_handlers = self._listen  # in place of Lightning's own

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not trainer.fit_loop._should_accumulate() and self._is_told(trainer) and self.checkpoint:
            trainer.save_checkpoint(self.checkpoint, weights_only=False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._is_told(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._stop(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.state.fn == "validate" and self._is_told(trainer):
            self._stop(trainer)

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._is_told(trainer):
            self._stop(trainer)

    on_predict_batch_end = on_test_batch_end

    def restore(self) -> None:
        """Listens no longer: signals do what they did before."""
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None is of a handler that Python does not know
        self.before = {}

    def _listen(self) -> None:
        self.before = self.before or {number: signal.signal(number, self._note) for number in SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = number

    def _is_told(self, trainer: Trainer) -> bool:
        """Whether a signal has reached any rank; all agree on the one of the highest number."""
        if not self.agreed:
            received = torch.tensor(self.received, device=trainer.strategy.root_device)
            self.agreed = int(trainer.strategy.reduce(received, reduce_op="max"))
        return self.agreed > 0

    def _stop(self, trainer: Trainer) -> None:
        if self.agreed:
            raise StoppedBySignal(self.agreed, self._told(trainer) if trainer.is_global_zero else "")

    def _told(self, trainer: Trainer) -> str:
        number = signal.Signals(self.agreed)
        done = f"ended by {number.name}"
        if trainer.global_step:
            done += f" after step {trainer.global_step}"
        if self.checkpoint:
            done += f", saved in {self.checkpoint}; the same command with --resume auto goes on from there"
        if self.requeue and number == signal.SIGUSR1 and "SLURM_JOB_ID" in os.environ:
            done += requeue(slurm_job())
        return done


def requeue(job: str) -> str:
    """Has SLURM start a job again, and says whether it will."""
    try:
        subprocess.run(["scontrol", "requeue", job], check=True, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return f", but SLURM could not be told to start it again: scontrol: {error.strerror}"
    except subprocess.CalledProcessError as error:
        why = " ".join(error.stderr.split()) or f"scontrol has ended with code {error.returncode}"
        return f", but SLURM could not be told to start it again: {why}"
    return ", and SLURM has been told to start it again"


def slurm_job() -> str:
    """The name by which SLURM knows this job, or this task of an array."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]
