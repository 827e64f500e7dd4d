"""Triton kernel of one iteration but its matrix product, for FP-RNN's core with Householder reflections, on GPUs.

Equations and tensors are those of `fused_step_cpu_kernels`. A program goes through the tokens of one sequence; a block
holds all channels of a token, so that norms, rms and the largest change are sums within the program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fprnn_lightning.channel_mixers.householder import SHORTEST
from fprnn_lightning.mixers.recurrent import NORM_EPSILON

CHANNELS_PER_WARP = 128


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _terms(raw, read, offset, at, real, is_read, scale, kind: tl.constexpr):
    """Raw terms from an offset on, with what they read of the token before, at another."""
    terms = tl.load(raw + offset, mask=real, other=0).to(kind)
    if read is not None:
        terms += scale * tl.load(read + at, mask=is_read, other=0).to(kind)
    return terms


@triton.jit
def _largest(x, bits: tl.constexpr, kind: tl.constexpr):
    """The largest |x|, NaN if there is one: as integers, numbers without sign have their order, and NaN is on top."""
    most: tl.constexpr = 2147483647 if bits == tl.int32 else 9223372036854775807
    return tl.max(x.to(bits, bitcast=True) & most, 0).to(kind, bitcast=True)


@triton.jit(do_not_specialize=["T"])
def step_kernel(
    raw, decay_read, mixer_read, input_read, x, y, out, change, size,
    raw_b, raw_t, read_b, read_t, x_b, x_t, y_b, y_t, T, D,
    SHORTEST: tl.constexpr, EPSILON: tl.constexpr, R: tl.constexpr, PRODUCT: tl.constexpr, NORMALISE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fills out (B, T, D), change and size (B, T), contiguous; rows of all others are, too. A read may be None."""
    kind: tl.constexpr = x.dtype.element_ty
    bits: tl.constexpr = tl.int64 if kind == tl.float64 else tl.int32
    b = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    real = d < D
    raw += b * raw_b
    x += b * x_b + d
    y += b * y_b + d
    out += b * T * D + d
    state = tl.zeros([BLOCK_D], kind)
    scale = tl.sum(state, 0)
    for t in range(T):
        is_read = real & (t > 0)
        at = b * read_b + tl.cast(t - 1, tl.int64) * read_t
        decay = _sigmoid(_terms(raw, decay_read, d, at + d, real, is_read, scale, kind))
        gate = _terms(raw, input_read, (1 + R) * D + R + d, at + d, real, is_read, scale, kind)
        w = (1 + gate) * tl.load(x, mask=real, other=0)
        before = tl.load(y, mask=real, other=0)
        v = before - w
        taken = tl.zeros([BLOCK_D], kind)
        for i in tl.static_range(R):
            r = R - 1 - i
            n = _terms(raw, mixer_read, (1 + r) * D + d, at + r * D + d, real, is_read, scale, kind)
            u = n * _sigmoid(n)
            length = tl.maximum(tl.sqrt(tl.sum(u * u, 0)), SHORTEST)
            place = (1 + R) * D + r
            strength = _sigmoid(_terms(raw, mixer_read, place, at + R * D + r, t >= 0, t > 0, scale, kind))
            dot = tl.sum(u * (v - taken), 0) if PRODUCT else tl.sum(u * v, 0)
            taken += strength * dot / (length * length) * u
        mixed = w + taken
        state = tl.where(real, mixed + decay * (state - mixed), 0)
        tl.store(out, state, mask=real)
        tl.store(change + b * T + t, _largest(state - before, bits, kind))
        tl.store(size + b * T + t, _largest(state, bits, kind))
        if NORMALISE:
            scale = 1 / tl.sqrt(tl.sum(before * before, 0) / D + EPSILON)
        else:
            scale = tl.sum(tl.where(d == 0, 1.0, 0.0), 0).to(kind)
        raw += raw_t
        x += x_t
        y += y_t
        out += D


def num_warps(block: int) -> int:
    """Warps of a program whose blocks have so many channels."""
    return max(1, min(8, block // CHANNELS_PER_WARP))


def iterate(
    rank: int,
    product: bool,
    normalise: bool,
    raw: Tensor,
    decay_read: Tensor | None,
    mixer_read: Tensor | None,
    input_read: Tensor | None,
    x: Tensor,
    y: Tensor,
    out: Tensor,
    change: Tensor,
    size: Tensor,
) -> None:
    """Fills out (B, T, D), change and size (B, T); see `fused_step_cpu_kernels.iterate`."""
    B, T, D = x.shape
    read = next((each for each in (decay_read, mixer_read, input_read) if each is not None), raw)
    block = triton.next_power_of_2(D)
    with torch.cuda.device_of(x):
        step_kernel[(B,)](
            raw, decay_read, mixer_read, input_read, x, y, out, change, size,
            *raw.stride()[:2], *read.stride()[:2], *x.stride()[:2], *y.stride()[:2], T, D,
            SHORTEST, NORM_EPSILON, R=rank, PRODUCT=product, NORMALISE=normalise,
            BLOCK_D=block, num_warps=num_warps(block),
        )  # fmt: skip
