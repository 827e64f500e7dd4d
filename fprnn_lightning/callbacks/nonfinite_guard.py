"""Stops a run at its first non-finite loss, before it reaches the weights, and says where it came from: the first
non-finite parameter, or else the first non-finite activation of the same forward, run again under hooks. All ranks
search, as a forward in training is a joint one, and say the same.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, distributed, nn


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
                origin = first_nonfinite(pl_module, tokens, trainer.world_size)
            raise NonFiniteError(
                f"the loss is {loss.item()} at step {trainer.global_step}; first not finite: {origin}; "
                f"last good checkpoint: {_last_good_checkpoint(trainer) or 'none yet'}"
            )


@torch.no_grad()
def first_nonfinite(model: nn.Module, tokens: Tensor, ranks: int = 1) -> str:
    """Names the first parameter, else the first module output in the forward of tokens (B, T), that is not finite.

    Args:
        model: a model in training.
        tokens: of this rank.
        ranks: how many search together; the first that has found something is named too.
    """
    for find in (_nonfinite_parameters, partial(_nonfinite_outputs, tokens=tokens)):
        found = [next(find(model), None)]
        if ranks > 1:
            found *= ranks
            distributed.all_gather_object(found, found[0])
        for rank, name in enumerate(found):
            if name:
                return f"{name} on rank {rank}" if ranks > 1 else name
    return "the loss itself (no parameter or activation)"


def _nonfinite_parameters(model: nn.Module) -> Iterator[str]:
    return (f"parameter {name}" for name, parameter in model.named_parameters() if not parameter.isfinite().all())


def _nonfinite_outputs(model: nn.Module, tokens: Tensor) -> Iterator[str]:
    """Names in the order of the forward, which is whole before the first comes."""
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
    return iter(found)


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
