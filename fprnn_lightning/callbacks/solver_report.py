"""What the solvers of the fixed-point layers did in the last training forward, per layer, only where it is logged."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from fprnn_lightning.mixers.base import SequenceMixer


def solver_diagnostics(model: nn.Module) -> dict[int, dict[str, Tensor]]:
    """What each sequence mixer that iterates says of its last forward, by its index among the sequence mixers."""
    mixers = [module for module in model.modules() if isinstance(module, SequenceMixer)]
    return {layer: report for layer, mixer in enumerate(mixers) if (report := mixer.diagnostics())}


class SolverReport(Callback):
    """Logs, every `log_every_n_steps` steps, `solver/layer_<i>/` `iterations` (mean over the sequences), `residual`
    (the largest) and `converged` (share of the sequences)."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer._logger_connector.should_update_logs:
            for layer, report in solver_diagnostics(pl_module).items():
                pl_module.log_dict(
                    {
                        f"solver/layer_{layer}/iterations": report["iterations"].float().mean(),
                        f"solver/layer_{layer}/residual": report["residual"].max(),
                        f"solver/layer_{layer}/converged": report["converged"].float().mean(),
                    }
                )
