"""A learnt orthogonal matrix, the same for all tokens: I - Q = (I - O) / 2 with O = (I - A) (I + A)^-1, A^T = -A.

O is Cayley's form of an orthogonal matrix. ||I - O|| may reach 2, so Q is half way between it and the identity:
Q = (I + A)^-1 and I - Q = A (I + A)^-1. The norm of the latter, mu / sqrt(1 + mu^2) with i mu the largest eigenvalue of
A, is less than 1 whatever A is. An option goes all the way, to Q = O.

A = W - W^T starts with mu near 1: O turns by up to a right angle, and ||I - Q|| is near 0.7.

Source: Fixed-Point RNNs (arXiv 2503.10799), the non-selective mixer of its code; Cayley transform: Helfrich, Willmott
and Ye 2018 (arXiv 1707.09520); the midpoint is the resolvent of A, and derived here.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from fprnn_lightning.channel_mixers.base import ChannelMixer, in_full_precision
from fprnn_lightning.channel_mixers.spectrum import spectral_norm


class Orthogonal(ChannelMixer[Tensor]):
    """A learnt rotation, or half the way to it, which does not depend on the input: I - Q (D, D) is its coefficient.

    Args:
        channels: D.
        largest: I - Q = largest * (I - O) / 2: with 1, Q is half way to the rotation O; with 2 it is the rotation
            itself, but beyond 1 ||I - Q|| < 1 is lost: the iteration may diverge, and there may be no solution.

    Raises:
        ValueError: if largest is not above 0 and at most 2.
    """

    def __init__(self, channels: int, largest: float = 1.0) -> None:
        super().__init__(channels, 0, largest)
        self.weight = nn.Parameter(torch.randn(channels, channels) / (8 * channels) ** 0.5)
        self.weight.no_weight_decay = True  # decay would pull Q to the identity, not to a smaller Q

    @in_full_precision
    def coefficients(self, raw: Tensor) -> Tensor:
        weight = self.weight.to(raw.dtype)
        skew = weight - weight.mT
        identity = torch.eye(self.channels, dtype=raw.dtype, device=raw.device)
        return self.largest * torch.linalg.solve_ex(identity + skew, skew)[0]  # singular values of I + A: 1 and more

    @in_full_precision
    def residual_apply(self, q: Tensor, v: Tensor) -> Tensor:
        return functional.linear(v, q)

    def coefficients_flops(self) -> int:
        return 0  # the same for all tokens

    def residual_flops(self) -> int:
        return 2 * self.channels**2

    @in_full_precision
    def residual_bound(self, q: Tensor) -> Tensor:
        """||I - Q|| itself."""
        return spectral_norm(q)
