"""Stops a run at its first non-finite loss, before it reaches the weights, and says where it came from: the first
non-finite parameter, or else the first non-finite activation of the same forward, run again under hooks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """The loss is infinite or not a number."""


class NonFiniteGuard(Callback):
    """Raises NonFiniteError at the first non-finite loss, on all ranks at once.

    The message names the step, the first parameter or activation concerned, and the newest checkpoint whose weights
    are finite.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batch = batch

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        loss = trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        if not loss.isfinite():
            tokens = self.batch[0][:, : pl_module.curriculum.length(trainer.global_step)]
            with trainer.precision_plugin.forward_context():
                origin = first_nonfinite(pl_module, tokens)
            raise NonFiniteError(
                f"the loss is {loss.item()} at step {trainer.global_step}; first not finite: {origin}; "
                f"last good checkpoint: {_last_good_checkpoint(trainer) or 'none yet'}"
            )


@torch.no_grad()
def first_nonfinite(model: nn.Module, tokens: Tensor) -> str:
    """Names the first parameter, else the first module output in the forward of tokens (B, T), that is not finite."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"parameter {name}"
    found = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not all(tensor.isfinite().all() for tensor in _tensors(output)):
                found.append(f"output of {name}")

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code has no hooks
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "the loss itself (no parameter or activation of this process)"


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors(part)


def _last_good_checkpoint(trainer: Trainer) -> Path | None:
    paths = [Path(trainer.ckpt_path)] if trainer.ckpt_path else []
    for callback in trainer.checkpoint_callbacks:
        paths += Path(callback.dirpath).glob("*.ckpt")
    for path in sorted(filter(Path.is_file, paths), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        weights = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        if all(weight.isfinite().all() for weight in weights.values()):
            return path
    return None
