"""What every fused iteration does of a token on CPUs: its raw terms, the mixing of its channels, its largest change."""

from collections.abc import Iterator

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from fprnn_lightning.channel_mixers.householder import SHORTEST
from fprnn_lightning.scan.selective_cpu_kernels import exp2
from fprnn_lightning.scan.thread_kernels import place, row

SMALLEST_SHARE = 8192  # numbers of the state; below, waking a second core costs more than it saves

# Sums may be reordered, so that they are vectorised; NaN and infinity keep their meaning, so that divergence is seen.
FAST = {"reassoc", "contract", "arcp", "nsz"}


@intrinsic
def magnitude(typingctx, x):
    """The bits of |x| as an integer: in the order of the numbers, NaN being the largest."""
    integer = {types.float32: types.int32, types.float64: types.int64}[x]

    def generate(context, builder, signature, arguments):
        kind = ir.IntType(integer.bitwidth)
        return builder.and_(builder.bitcast(arguments[0], kind), kind(2 ** (integer.bitwidth - 1) - 1))

    return integer(x), generate


@intrinsic
def number(typingctx, bits):
    """The number that has these bits."""
    real = {types.int32: types.float32, types.int64: types.float64}[bits]

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(real))

    return real(bits), generate


@njit(fastmath=False, error_model="numpy")  # not fast, which it would take over, as exp2's order of sums matters
def sigmoid(x, one, rate):
    """1 / (1 + e^-x), for a rate of -log2 e."""
    return one / (one + exp2(rate * x))


@njit
def copy(out, source, size, zero):
    """out = source."""
    out, source = row(out, size, zero), row(source, size, zero)
    for k in range(size):
        out[k] = source[k]


@njit(fastmath=FAST)
def add(out, source, factor, size, zero):
    """out += factor * source."""
    out, source = row(out, size, zero), row(source, size, zero)
    for k in range(size):
        out[k] += factor * source[k]


@njit(fastmath=FAST)
def _add_read(terms, raw, read, scale, size, zero):
    terms, raw, read = row(terms, size, zero), row(raw, size, zero), row(read, size, zero)
    for k in range(size):
        terms[k] = raw[k] + scale * read[k]


@njit
def read_term(term, raw, layout, b, t, scale, size, zero):
    """The raw term of a token with what it reads of the one before, if it reads anything; see `layouts`."""
    if t > 0 and layout[0] != 0:
        _add_read(term, raw, place(layout, b, t - 1), scale, size, zero)
    else:
        copy(term, raw, size, zero)


@njit(fastmath=FAST)
def _reflect(n, v, taken, keep, D, one, rate):
    """silu(n) in the place of n; returns its square and its product with v, less what was taken if keep is 1."""
    n, v, taken = row(n, D, one), row(v, D, one), row(taken, D, one)
    square, dot = one - one, one - one
    for d in range(D):
        u = n[d] * sigmoid(n[d], one, rate)
        n[d] = u
        square += u * u
        dot += u * (v[d] - keep * taken[d])
    return square, dot


@njit
def mix(directions, strengths, v, taken, R, keep, D, one, rate):
    """(I - Q) v in the place of taken, 0 before, from raw directions and strengths; keep is 1 for a product, else 0."""
    strengths = row(strengths, R, one)
    for r in range(R - 1, -1, -1):
        u = directions + r * D * strengths.itemsize
        square, dot = _reflect(u, v, taken, keep, D, one, rate)
        length = max(np.sqrt(square), strengths.dtype.type(SHORTEST))
        add(taken, u, sigmoid(strengths[r], one, rate) * dot / (length * length), D, one)


def layouts(*tensors: Tensor | None) -> Iterator[int]:
    """Of each tensor its address and the bytes to the next sequence and token; 0, 0 and 0 where there is none."""
    for each in tensors:
        yield from (
            (0, 0, 0) if each is None else (each.data_ptr(), *(each.element_size() * s for s in each.stride()[:2]))
        )
