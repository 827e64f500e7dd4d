"""By how much an iteration brings a token nearer to its fixed point, given the tokens before it: the spectral norm of

    A_t = diag(gain_t) (I - Q_t),    error_t <- A_t error_t.

The tokens before it have an influence too, through gates and Q, but it takes one iteration more for every token that it
crosses, so however large it is it dies out. Power iteration on A^T A gives an estimate from below, which for one
reflection is exact; the largest gain times the mixer's own bound on ||I - Q_t|| is above it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fprnn_lightning.channel_mixers import ChannelMixer

POWERS = 24


def contraction(channel_mixer: ChannelMixer, q: Any, gain: Tensor) -> Tensor:
    """An estimate of ||diag(gain) (I - Q)||, from below: gain (..., D) -> (...,). Not within inference mode."""
    start = torch.randn(gain.shape[-1], generator=torch.Generator().manual_seed(0)).to(gain)

    def apply(v: Tensor) -> Tensor:
        return gain * channel_mixer.residual_apply(q, v)

    v = functional.normalize(start, dim=0).expand_as(gain)
    image, transposed = torch.func.vjp(apply, v)
    for _ in range(POWERS):
        v = functional.normalize(transposed(image)[0], dim=-1)
        image = apply(v)
    return torch.linalg.vector_norm(image, dim=-1)


def contraction_bound(channel_mixer: ChannelMixer, q: Any, gain: Tensor) -> Tensor:
    """At least ||diag(gain) (I - Q)||: gain (..., D) -> (...,)."""
    return gain.abs().amax(-1) * channel_mixer.residual_bound(q)
