"""Before anything is trained or measured, all ranks make sure that they start the same: with the same options, and from
the same step of the same run. They are started apart, on machines whose files may differ.
"""

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed

from fprnn_lightning.sentences import UsageError


class SameStart(Callback):
    """Compares the ranks' starts.

    Args:
        options: by dotted name, those that must be equal.
        folder: of the run that goes on, "" if it is a new one.
        step: gives the optimiser steps before; asked when all ranks are there, as until then another process may have
            been saving what they go on from.
    """

    def __init__(self, options: Mapping[str, Any], folder: str, step: Callable[[], int]) -> None:
        self.options = dict(options)
        self.folder = folder
        self.step = step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Once the ranks have met.

        Raises:
            UsageError: on all ranks if they differ.
        """
        if trainer.world_size > 1:
            trainer.strategy.barrier()
            starts: list[Any] = [None] * trainer.world_size
            distributed.all_gather_object(starts, (self.options, self.folder, self.step()))
            for rank, start in enumerate(starts):
                if start != starts[0]:
                    raise UsageError(_difference(rank, starts[0], start))


def _difference(rank: int, first: tuple[dict, str, int], other: tuple[dict, str, int]) -> str:
    names = {**first[0], **other[0]}
    if changed := [name for name in names if first[0].get(name) != other[0].get(name)]:
        return f"process {rank} of this run has another {' and '.join(changed)} than process 0, start all with the same"
    ours, theirs = (f"from step {step}{' of ' * bool(folder)}{folder}" for _, folder, step in (first, other))
    return f"process 0 of this run starts {ours}, process {rank} {theirs}; all machines must see the same files"
