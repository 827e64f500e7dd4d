"""A dense, positive semidefinite matrix per token, Q = S (I + S)^-1 = I - (I + S)^-1 with S = L L^T, for small D.

An eigenvalue s >= 0 of S makes an eigenvalue s / (1 + s) of Q, so 0 <= Q < I and ||I - Q|| <= 1 by construction, less
than 1 unless L is singular; no norm has to be computed. Every symmetric matrix with eigenvalues in [0, 1) is such a Q.

L = I + raw / sqrt(D): Q = I / 2 where raw terms are 0. Training starts with some of 0.3, and with ||I - Q|| = 0.7.

Source: Fixed-Point RNNs (arXiv 2503.10799), the selective dense mixer of its code; the parametrisation is ours.
"""

import torch
from torch import Tensor

from fprnn_lightning.channel_mixers.base import ChannelMixer, in_full_precision
from fprnn_lightning.channel_mixers.spectrum import spectral_norm

MOST_CHANNELS = 64


class Dense(ChannelMixer[Tensor]):
    """A dense symmetric matrix, made from D^2 numbers per token at the cost of D^3 operations: I - Q (..., D, D).

    Args:
        channels: D.
        largest: eigenvalues of Q are in [0, largest). Beyond 1 some directions are amplified, and I - Q has eigenvalues
            of both signs; ||I - Q|| <= 1 still holds.

    Raises:
        ValueError: if there are more than 64 channels, or largest is not above 0 and at most 2.
    """

    def __init__(self, channels: int, largest: float = 1.0) -> None:
        if channels > MOST_CHANNELS:
            raise ValueError(
                f"Dense: {channels} channels need {channels**2} numbers per token; it is for at most {MOST_CHANNELS}"
            )
        super().__init__(channels, channels**2, largest)

    @in_full_precision
    def coefficients(self, raw: Tensor) -> Tensor:
        identity = torch.eye(self.channels, dtype=raw.dtype, device=raw.device)
        root = identity + raw.unflatten(-1, (self.channels, self.channels)) / self.channels**0.5
        inverse, _ = torch.linalg.inv_ex(identity + root @ root.mT)
        return (1 - self.largest) * identity + self.largest * inverse

    @in_full_precision
    def residual_apply(self, q: Tensor, v: Tensor) -> Tensor:
        return (q @ v[..., None])[..., 0]

    def coefficients_flops(self) -> int:
        return 4 * self.channels**3  # L L^T and an inverse

    def residual_flops(self) -> int:
        return 2 * self.channels**2

    def solve_flops(self) -> int:
        return 2 * self.channels**3 // 3 + 2 * self.channels**2

    @in_full_precision
    def residual_bound(self, q: Tensor) -> Tensor:
        """||I - Q|| itself."""
        return spectral_norm(q)

    @in_full_precision
    def solve(self, q: Tensor, gain: Tensor, v: Tensor) -> Tensor:
        identity = torch.eye(self.channels, dtype=v.dtype, device=v.device)
        return torch.linalg.solve_ex(identity - gain[..., None] * q, v[..., None])[0][..., 0]
