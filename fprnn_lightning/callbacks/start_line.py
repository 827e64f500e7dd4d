"""One line at the start of a fit: device, scan backend, parameters, tokens per step, folder."""

from lightning.pytorch import Callback, LightningModule, Trainer

from fprnn_lightning.scan import resolve_backend


class StartLine(Callback):
    """Prints what is about to run, and on what."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parameters = sum(parameter.numel() for parameter in pl_module.parameters())
        devices = f" x {trainer.world_size}" if trainer.world_size > 1 else ""
        sequences = trainer.datamodule.batch_size
        tokens = sequences * pl_module.curriculum.end
        if trainer.is_global_zero:
            print(
                f"device {pl_module.device}{devices} · scan backend {resolve_backend(next(pl_module.parameters()))} · "
                f"{parameters:,} parameters · {tokens:,} tokens per step "
                f"({sequences} sequences of up to {pl_module.curriculum.end}) · {trainer.default_root_dir}",
                flush=True,
            )
