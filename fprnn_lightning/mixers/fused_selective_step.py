"""What Mamba's core brings to the fused iteration: its kernel, the weights this reads, and what is seen of an iterate.

Source of the equations: `cores/selective_ssm.py`.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from fprnn_lightning.cores.selective_ssm import SelectiveSSM


class FusedSelectiveSSM:
    """The core in one solve, see `FusedGatedDiagonal`.

    Args:
        core: the core.
        x: its input (B, T, D).
    """

    kernels: ClassVar[str] = "fused_selective_step"
    most_channels: ClassVar[dict[str, int]] = {"cpu": 2**31}

    def __init__(self, core: SelectiveSSM, x: Tensor) -> None:
        rates = core.A_log.detach().to(x.dtype).exp() / -math.log(2)  # exp(dt A) = 2^(dt rates)
        slowest = rates.amax(-1)
        weights = (each.detach().to(x.dtype) for each in (core.dt_weight.T, core.dt_bias, core.D))
        self.arguments = core.unit_gates, *(each.contiguous() for each in (rates.T, slowest, *weights))
        self._passing, self._seen = core.D.detach().to(x.dtype) * x, torch.empty_like(x)

    def seen(self, y: Tensor) -> Tensor:
        """s = y + D x of an iterate, until the next call."""
        return torch.add(y, self._passing, out=self._seen)
