"""numba kernel of one iteration but its matrix product, for Mamba's core with Householder reflections, on CPUs.

Per token, with read = V s_{t-1} of the last iterate's s = y + D x, rms_{t-1} that of s_{t-1} (1 where it is not
normalised), (I - Q) v as in `fused_step_cpu_kernels`, and b and c brought to unit length if wanted:

    terms = raw + read / rms_{t-1} = [decay | directions R D | strengths R | b N | c N],   dt = softplus(W decay + bias)
    H_t = exp(dt A) * H_{t-1} + u b^T,    u = dt x_t + (1 - exp(dt max A)) (I - Q)(y_t - x_t),    y_t = H_t c

A core takes sequence after sequence and goes through its tokens in order. D N exponentials are most of the work. They
are taken state after state, whose rows of D channels stay, with those of the rates, in the nearest caches.
"""

from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit
from numba.extending import intrinsic
from numpy import arctanh, sqrt
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from fprnn_lightning.channel_mixers.householder import SHORTEST
from fprnn_lightning.mixers.recurrent import NORM_EPSILON
from fprnn_lightning.mixers.token_cpu_kernels import (
    FAST,
    SMALLEST_SHARE,
    add,
    copy,
    layouts,
    magnitude,
    mix,
    number,
    read_term,
)
from fprnn_lightning.scan.selective_cpu_kernels import LOG2_E, exp2, exp2_minus_1
from fprnn_lightning.scan.thread_kernels import ZEROS, compile_worker, place, row, run, take_ticket, version

SHORTEST_GATE = 1e-12  # torch's normalize; a gate shorter than this is not brought to unit length

# A job: a ticket counter and numbers, then for each tensor its address and the bytes to the next sequence and token
BATCH, TIME, CHANNELS, RANK, PRODUCT, NORMALISE, STATES, DT_RANK, UNIT_GATES, HEAD = range(1, 11)
RAW, DECAY_READ, MIXER_READ, INPUT_READ, OUTPUT_READ, X, Y, OUT, CHANGE, SIZE = range(10)
RATES, SLOWEST, DT_WEIGHT, DT_BIAS, SKIP, TENSORS = range(10, 16)

# Polynomials for atanh(s) / s of s^2, s in (0, 1/3], nearly minimax, in float32 and float64
_ATANH = {
    kind: [
        *Chebyshev.interpolate(lambda w: arctanh(sqrt(w)) / sqrt(w), degree, [0, 1 / 9]).convert(kind=Polynomial).coef
    ]
    for kind, degree in ((ir.FloatType(), 4), (ir.DoubleType(), 11))
}


@intrinsic
def _log1p(typingctx, z):
    """log(1 + z) = 2 atanh(z / (2 + z)), z in [0, 1], to about one unit in the last place."""

    def generate(context, builder, signature, arguments):
        (z,) = arguments
        real = z.type
        multiply_add = builder.module.declare_intrinsic("llvm.fmuladd", [real], ir.FunctionType(real, [real] * 3))
        s = builder.fdiv(z, builder.fadd(z, real(2)))
        w = builder.fmul(s, s)
        *lower, p = map(real, map(float, _ATANH[real]))
        for term in reversed(lower):
            p = builder.call(multiply_add, [p, w, term])
        return builder.fmul(builder.fadd(s, s), p)

    return z(z), generate


@njit(fastmath=False)  # not fast, which it would take over, as exp2's order of sums matters
def _softplus(x, zero, rate):
    """log(1 + e^x), for a rate of -log2 e."""
    return (x if x > zero else zero) + _log1p(exp2(rate * abs(x)))


@njit
def step_sizes(dt, D, zero, rate):
    """softplus in place."""
    dt = row(dt, D, zero)
    for d in range(D):
        dt[d] = _softplus(dt[d], zero, rate)


@njit(fastmath=FAST)
def _to_unit(gate, N, zero):
    gate = row(gate, N, zero)
    square = zero
    for n in range(N):
        square += gate[n] * gate[n]
    length = max(np.sqrt(square), gate.dtype.type(SHORTEST_GATE))
    for n in range(N):
        gate[n] /= length


@njit(fastmath=FAST)
def _difference(x, y, skip, v, taken, D, zero):
    """v = y - x, nothing taken yet; returns the sum of s^2."""
    x, y, skip, v, taken = row(x, D, zero), row(y, D, zero), row(skip, D, zero), row(v, D, zero), row(taken, D, zero)
    square = zero
    for d in range(D):
        v[d] = y[d] - x[d]
        taken[d] = zero
        s = y[d] + skip[d] * x[d]
        square += s * s
    return square


@njit(fastmath={"contract"})
def drive(u, taken, dt, slowest, x, out, D, zero):
    """u, and y = 0 before any state is read."""
    u, taken, dt, slowest = row(u, D, zero), row(taken, D, zero), row(dt, D, zero), row(slowest, D, zero)
    x, out = row(x, D, zero), row(out, D, zero)
    for d in range(D):
        u[d] = dt[d] * x[d] - exp2_minus_1(dt[d] * slowest[d]) * taken[d]
        out[d] = zero


@njit(fastmath={"contract"})
def _pass_on(state, rate, dt, u, out, b, c, D, zero):
    """One of the N states of every channel: h = a h + u b, y += h c."""
    state, rate, dt, u = row(state, D, zero), row(rate, D, zero), row(dt, D, zero), row(u, D, zero)
    out = row(out, D, zero)
    for d in range(D):
        h = exp2(dt[d] * rate[d]) * state[d] + u[d] * b
        state[d] = h
        out[d] += h * c


@njit(fastmath=FAST)
def _measure(out, y, D, zero):
    """The largest |out - y| and |out|."""
    out, y = row(out, D, zero), row(y, D, zero)
    change, size = magnitude(zero), magnitude(zero)
    for d in range(D):
        change = max(change, magnitude(out[d] - y[d]))
        size = max(size, magnitude(out[d]))
    return number(change), number(size)


@njit
def _tensor(job, i):
    return job[HEAD + 3 * i], job[HEAD + 3 * i + 1], job[HEAD + 3 * i + 2]


@njit(error_model="numpy")
def _sequence(job, b, scratch):
    """scratch has room for dt, v and what was taken of it, for the N states, and for the terms of a token."""
    D, R, N, size, numbers = job[CHANNELS], job[RANK], job[STATES], scratch.itemsize, scratch.dtype.type
    zero, one, rate, keep = numbers(0), numbers(1), numbers(-LOG2_E), numbers(job[PRODUCT])
    channels = D * size  # bytes of D numbers
    dt = scratch.ctypes.data
    v, taken, states, terms = dt + channels, dt + 2 * channels, dt + 3 * channels, dt + (3 + N) * channels
    directions = terms + job[DT_RANK] * size
    strengths = directions + R * channels
    input_gate = strengths + R * size
    output_gate = input_gate + N * size
    rates, weight, bias = _tensor(job, RATES), _tensor(job, DT_WEIGHT), _tensor(job, DT_BIAS)[0]
    slowest, skip = _tensor(job, SLOWEST)[0], _tensor(job, SKIP)[0]
    row(states, N * D, zero)[:] = zero
    scale = zero
    for t in range(job[TIME]):
        raw = place(_tensor(job, RAW), b, t) - terms
        for term, count, i in (
            (terms, job[DT_RANK], DECAY_READ),
            (directions, R * D + R, MIXER_READ),
            (input_gate, N, INPUT_READ),
            (output_gate, N, OUTPUT_READ),
        ):
            read_term(term, raw + term, _tensor(job, i), b, t, scale, count, zero)
        x, y, out = place(_tensor(job, X), b, t), place(_tensor(job, Y), b, t), place(_tensor(job, OUT), b, t)
        copy(dt, bias, D, zero)
        decay = row(terms, job[DT_RANK], zero)
        for k in range(job[DT_RANK]):
            add(dt, place(weight, 0, k), decay[k], D, zero)
        step_sizes(dt, D, zero, rate)
        mean = _difference(x, y, skip, v, taken, D, zero) / numbers(D)
        scale = one / np.sqrt(mean + numbers(NORM_EPSILON)) if job[NORMALISE] else one
        mix(directions, strengths, v, taken, R, keep, D, one, rate)
        u = v  # no longer needed
        drive(u, taken, dt, slowest, x, out, D, zero)
        if job[UNIT_GATES]:
            _to_unit(input_gate, N, zero)
            _to_unit(output_gate, N, zero)
        gates = row(input_gate, 2 * N, zero)
        for n in range(N):
            _pass_on(states + n * channels, place(rates, 0, n), dt, u, out, gates[n], gates[N + n], D, zero)
        change, largest = _measure(out, y, D, zero)
        row(place(_tensor(job, CHANGE), b, t), 1, zero)[0] = change
        row(place(_tensor(job, SIZE), b, t), 1, zero)[0] = largest


@njit(error_model="numpy")
def _work(counter, zero):
    job = carray(counter, (HEAD + 3 * TENSORS,))
    D, R, N = job[CHANNELS], job[RANK], job[STATES]
    scratch = np.empty((3 + N + R) * D + R + 2 * N + job[DT_RANK], row(0, 1, zero).dtype)
    b = take_ticket(counter)
    while b < job[BATCH]:
        _sequence(job, b, scratch)
        b = take_ticket(counter)


def _make_worker(zero, version):
    def work(counter):
        if version:
            _work(counter, zero)

    return work


@cache
def _worker(dtype: torch.dtype):
    return compile_worker(_make_worker(ZEROS[dtype], version(NORM_EPSILON, SHORTEST)))


def iterate(
    rank: int,
    product: bool,
    normalise: bool,
    unit_gates: bool,
    rates: Tensor,
    slowest: Tensor,
    dt_weight: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    raw: Tensor,
    decay_read: Tensor | None,
    mixer_read: Tensor | None,
    input_read: Tensor | None,
    output_read: Tensor | None,
    x: Tensor,
    y: Tensor,
    out: Tensor,
    change: Tensor,
    size: Tensor,
) -> None:
    """Fills out (B, T, D) with f(y), change and size (B, T) with each token's largest |f(y) - y| and |f(y)|.

    Args:
        rank: directions R.
        product: whether Q is the product of the reflections, or the identity less their sum.
        normalise: whether terms read s brought to unit root mean square, or s itself.
        unit_gates: whether b and c are brought to unit length.
        rates: A log2 e (N, D), contiguous.
        slowest: the largest of each channel (D,).
        dt_weight: W (numbers that step sizes are made from, D), contiguous.
        dt_bias: (D,).
        skip: D of s = y + D x (D,).
        raw: terms of the input (B, T, K), as [decay | directions R D | strengths R | b N | c N].
        decay_read: V s for the decay; None where it is 0.
        mixer_read: that for the channel mixer (B, T, R D + R).
        input_read: that for b (B, T, N).
        output_read: that for c (B, T, N).
        x: input of the core (B, T, D).
        y: the last iterate (B, T, D).
        out: filled with the next one.
        change: filled, contiguous.
        size: filled, contiguous.
    """
    (B, T, D), (N, _), dtype = x.shape, rates.shape, x.dtype
    reads = [None if read is None else read.to(dtype) for read in (decay_read, mixer_read, input_read, output_read)]
    constants = (each.reshape(1, -1, D) for each in (rates, slowest, dt_weight, dt_bias, skip))
    threads = max(1, min(torch.get_num_threads(), B, B * T * D * N // SMALLEST_SHARE))
    numbers = 0, B, T, D, rank, product, normalise, N, len(dt_weight), unit_gates
    job = *numbers, *layouts(raw, *reads, x, y, out, change, size, *constants)
    run(_worker(dtype), job, threads)
