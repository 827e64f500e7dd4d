"""Mamba's step sizes: how they begin, and what weight they give to a fixed point's residual.

At first dt = softplus(bias) is log-uniform between 0.001 and 0.1, and never below a floor.

Source: Mamba (arXiv 2312.00752), section 3.6; the weight: see `selective_ssm.py`.
"""

import math

import torch
from torch import Tensor

SMALLEST, LARGEST, FLOOR = 1e-3, 1e-1, 1e-4


def step_size_bias(size: int) -> Tensor:
    """Biases (size,) with such a softplus."""
    exponents = torch.empty(size).uniform_(math.log(SMALLEST), math.log(LARGEST))
    dt = exponents.exp().clamp_min(FLOOR)
    return dt + torch.log(-torch.expm1(-dt))  # the inverse of softplus


def residual_weight(dt: Tensor, rate: Tensor) -> Tensor:
    """kappa with dt * kappa = 1 - exp(dt * rate), from step sizes dt > 0 and the slowest rate < 0 -> like dt."""
    shortest = torch.finfo(dt.dtype).tiny ** 0.5  # where 1 / dt is far from overflow, and dt kappa 0
    return -torch.expm1(dt * rate) / dt.clamp_min(shortest)
