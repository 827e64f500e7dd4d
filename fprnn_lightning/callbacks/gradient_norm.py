"""The 2-norm of all gradients before clipping, as `train/gradient_norm`, computed only where it is logged."""

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


class GradientNorm(Callback):
    """Logs `train/gradient_norm`, before clipping, every `log_every_n_steps` steps."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if trainer._logger_connector.should_update_logs:
            gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
            norm = get_total_norm(gradients)
            pl_module.log("train/gradient_norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)
