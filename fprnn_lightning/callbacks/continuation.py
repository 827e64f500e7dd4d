"""What a checkpoint needs beyond weights, optimiser and curriculum so that a resumed run is the uninterrupted one: the
random states of all ranks, and that all that has been logged before it is on the disk. It goes on at the beginning of
an optimiser step, in however many batches each of them then is.
"""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed


class Continuation(Callback):
    """Keeps the random states in every checkpoint, and sets them again where training goes on."""

    def __init__(self) -> None:
        self.is_loaded = False
        self.restored: list[dict[str, Any]] = []  # by rank

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        for logger in trainer.loggers:
            logger.save()
        states = [random_states()]
        if trainer.world_size > 1:
            states = [None] * trainer.world_size
            distributed.all_gather_object(states, random_states())
        checkpoint["random_states"] = states
        checkpoint["accumulated"] = trainer.accumulate_grad_batches

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.is_loaded, self.restored = True, checkpoint.get("random_states", [])
        now = trainer.accumulate_grad_batches
        begin_step(checkpoint["loops"]["fit_loop"], checkpoint.get("accumulated", now), now)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._restore(trainer)  # only now, as making the loader's iterator has drawn a number

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_loaded:  # a run that was over but for its test, whose one epoch Lightning has not begun again
            for counts in (trainer.fit_loop.epoch_progress.total, trainer.fit_loop.epoch_progress.current):
                counts.processed = counts.completed = counts.started
        self._restore(trainer)

    def _restore(self, trainer: Trainer) -> None:
        if self.is_loaded:
            # the step of what is logged, which depends on whether a validation was due when the checkpoint was saved
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
            if len(self.restored) == trainer.world_size:
                set_random_states(self.restored[trainer.global_rank])
            self.is_loaded = False


def begin_step(progress: dict[str, Any], before: int, now: int) -> None:
    """Sets the progress of a fit, counted in batches, to the beginning of the optimiser step that comes next.

    Args:
        progress: of a checkpoint; changed in place.
        before: batches to a step when it was saved.
        now: batches to a step from here on.
    """
    for counts in (progress["epoch_loop.batch_progress"][part] for part in ("total", "current")):
        steps, batches = divmod(counts["processed"], before)
        unfinished = 0 if batches else counts["processed"] - counts["completed"]  # 1 if saved as the batch ended
        counts.update(dict.fromkeys(("ready", "started", "processed"), steps * now), completed=steps * now - unfinished)


def random_states() -> dict[str, Any]:
    """The states of the random generators of Python, NumPy and PyTorch, as plain types and tensors."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Brings all generators to states that `random_states` has given."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
