"""What the solvers of the fixed-point layers did, per layer: in the last training forward, where it is logged, and over
a whole validation or test set. A solve that did not converge is reported and warned about, not an error. That of a
gradient is known after backward, and reported beside that of the states, its names beginning with adjoint_. All is of
the sequences of all ranks.
"""

from collections import defaultdict
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, distributed, nn

from fprnn_lightning.mixers.base import SequenceMixer
from fprnn_lightning.training.metrics import IGNORED

Report = dict[str, Tensor]  # iterations, residual, converged, and adjoint_iterations and so on, each (B,)


def solver_diagnostics(model: nn.Module) -> dict[int, Report]:
    """What each sequence mixer that iterates says of its last forward, by its index among the sequence mixers."""
    mixers = [module for module in model.modules() if isinstance(module, SequenceMixer)]
    return {layer: report for layer, mixer in enumerate(mixers) if (report := mixer.diagnostics())}


def summary(report: Report, prefix: str) -> dict[str, Tensor]:
    """The report of a batch or a set as scalars, named as logged."""
    return {
        f"{prefix}/{name}": part.max() if name.endswith("residual") else part.float().mean()
        for name, part in report.items()
    }


def of_all_ranks(reports: dict[int, Report], ranks: int) -> dict[int, Report]:
    """The reports by layer of the sequences of all ranks."""
    if ranks == 1:
        return reports
    gathered = [reports] * ranks
    here = {layer: {name: part.cpu() for name, part in report.items()} for layer, report in reports.items()}
    distributed.all_gather_object(gathered, here)
    return joined(gathered)


def joined(parts: list[dict[int, Report]]) -> dict[int, Report]:
    """Reports by layer of different sequences, as of all of them."""
    layers = defaultdict(list)
    for reports in parts:
        for layer, report in reports.items():
            layers[layer].append(report)
    return {
        layer: {name: torch.cat([report[name] for report in reports]) for name in reports[0]}
        for layer, reports in sorted(layers.items())
    }


class SolverReport(Callback):
    """Logs `iterations` (mean over the sequences), `residual` (the largest) and `converged` (share of the sequences).

    In training as `solver/layer_<i>/...`, every `log_every_n_steps` steps, with a warning the first time that a
    gradient has not converged; of a whole validation or test set as `validation/solver/layer_<i>/...` or
    `test/solver/layer_<i>/...`, and outside a fit with a warning if some have not converged.
    """

    def __init__(self) -> None:
        self.reports: list[dict[int, Report]] = []  # by batch
        self.has_warned_of_gradient = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer._logger_connector.should_update_logs:
            for layer, report in of_all_ranks(solver_diagnostics(pl_module), trainer.world_size).items():
                pl_module.log_dict(summary(report, f"solver/layer_{layer}"))
                if not self.has_warned_of_gradient and "adjoint_converged" in report:
                    self._warn_of_gradient(layer, report, trainer.global_step)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self._collect(pl_module, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        self._collect(pl_module, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._conclude(trainer, pl_module, "validation")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._conclude(trainer, pl_module, "test")

    def _warn_of_gradient(self, layer: int, report: Report, step: int) -> None:
        converged = report["adjoint_converged"]
        if not converged.all():
            self.has_warned_of_gradient = True
            rank_zero_warn(
                f"layer {layer}: the gradients of {(~converged).sum().item()} of {len(converged)} sequences have not "
                f"converged after {report['adjoint_iterations'].max().item()} iterations in step {step}, the largest "
                f"relative change is {report['adjoint_residual'].max().item():.2g}; this is said once, "
                f"solver/layer_{layer}/adjoint_converged tells of every logged step"
            )

    def _collect(self, pl_module: LightningModule, batch: Any) -> None:
        if (batch[1] != IGNORED).any():  # else it is there only to even out the batches of the ranks
            self.reports.append(solver_diagnostics(pl_module))

    def _conclude(self, trainer: Trainer, pl_module: LightningModule, split: str) -> None:
        for layer, report in of_all_ranks(joined(self.reports), trainer.world_size).items():
            pl_module.log_dict(summary(report, f"{split}/solver/layer_{layer}"), sync_dist=True, reduce_fx="max")
            failed = (~report["converged"]).sum().item()
            if failed and trainer.state.fn != "fit":
                rank_zero_warn(
                    f"layer {layer}: {failed} of {len(report['converged'])} {split} sequences have not converged after "
                    f"{report['iterations'].max().item()} iterations, the largest relative change is "
                    f"{report['residual'].max().item():.2g}"
                )
        self.reports.clear()
