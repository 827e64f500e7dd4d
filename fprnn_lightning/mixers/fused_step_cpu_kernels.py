"""numba kernel of one iteration but its matrix product, for FP-RNN's core with Householder reflections, on CPUs.

Per token, with read = V y_{t-1}, rms_{t-1} that of the last iterate's y_{t-1} (1 where it is not normalised), and
u_r = silu(n_r) / |silu(n_r)|, lambda and alpha the sigmoids of their raw terms:

    terms = raw + read / rms_{t-1} = [decay D | directions R D | strengths R | input D],   w = (1 + input) * x
    h_t = lambda * h_{t-1} + (1 - lambda) * (w + (I - Q)(y_t - w)),    (I - Q) v = sum_r alpha_r u_r u_r^T v_r

with v_r = v for a sum, and for a product v less what the reflections after r have taken. A core takes sequence after
sequence and goes through its tokens in order: all of a token stays in the first cache until it is done.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from fprnn_lightning.channel_mixers.householder import SHORTEST
from fprnn_lightning.mixers.recurrent import NORM_EPSILON
from fprnn_lightning.mixers.token_cpu_kernels import (
    FAST,
    SMALLEST_SHARE,
    layouts,
    magnitude,
    mix,
    number,
    read_term,
    sigmoid,
)
from fprnn_lightning.scan.selective_cpu_kernels import LOG2_E
from fprnn_lightning.scan.thread_kernels import ZEROS, compile_worker, place, row, run, take_ticket, version

# A job: a ticket counter and numbers, then for each tensor its address and the bytes to the next sequence and token
BATCH, TIME, CHANNELS, RANK, PRODUCT, NORMALISE, HEAD = range(1, 8)
RAW, DECAY_READ, MIXER_READ, INPUT_READ, X, Y, OUT, CHANGE, SIZE, TENSORS = range(10)


@njit(fastmath=FAST)
def _gate(decay, D, one, rate):
    decay = row(decay, D, one)
    for d in range(D):
        decay[d] = sigmoid(decay[d], one, rate)


@njit(fastmath=FAST)
def _difference(value, x, y, v, taken, D, one):
    """w = (1 + input) * x in the place of its term, v = y - w, nothing taken yet; returns the sum of y^2."""
    value, x, y, v, taken = row(value, D, one), row(x, D, one), row(y, D, one), row(v, D, one), row(taken, D, one)
    square = one - one
    for d in range(D):
        w = (one + value[d]) * x[d]
        value[d] = w
        v[d] = y[d] - w
        square += y[d] * y[d]
    for d in range(D):
        taken[d] = one - one
    return square


@njit(fastmath=FAST)
def _pass_on(decay, value, taken, y, before, out, D, zero):
    """h_t from h_{t-1}; returns the largest |h_t - y_t| and |h_t|."""
    decay, value, taken, y = row(decay, D, zero), row(value, D, zero), row(taken, D, zero), row(y, D, zero)
    before, out = row(before, D, zero), row(out, D, zero)
    change, size = magnitude(zero), magnitude(zero)
    for d in range(D):
        mixed = value[d] + taken[d]
        h = mixed + decay[d] * (before[d] - mixed)
        out[d] = h
        change = max(change, magnitude(h - y[d]))
        size = max(size, magnitude(h))
    return number(change), number(size)


@njit
def _tensor(job, i):
    return job[HEAD + 3 * i], job[HEAD + 3 * i + 1], job[HEAD + 3 * i + 2]


@njit(error_model="numpy")
def _sequence(job, b, scratch):
    """scratch has room for the terms of a token, v and what was taken of it, then the state before the first, 0."""
    D, R, size, numbers = job[CHANNELS], job[RANK], scratch.itemsize, scratch.dtype.type
    channels, strengths = D * size, (1 + R) * D  # bytes of D numbers; where the strengths begin
    terms = scratch.ctypes.data
    value = terms + (strengths + R) * size
    v = value + channels
    taken, before = v + channels, v + 2 * channels
    zero, one, rate, keep = numbers(0), numbers(1), numbers(-LOG2_E), numbers(job[PRODUCT])
    scale = zero
    for t in range(job[TIME]):
        raw = place(_tensor(job, RAW), b, t)
        for first, count, i in ((0, D, DECAY_READ), (D, R * D + R, MIXER_READ), (strengths + R, D, INPUT_READ)):
            part = first * size
            read_term(terms + part, raw + part, _tensor(job, i), b, t, scale, count, zero)
        x, y, out = place(_tensor(job, X), b, t), place(_tensor(job, Y), b, t), place(_tensor(job, OUT), b, t)
        _gate(terms, D, one, rate)
        mean = _difference(value, x, y, v, taken, D, one) / numbers(D)
        scale = one / np.sqrt(mean + numbers(NORM_EPSILON)) if job[NORMALISE] else one
        mix(terms + channels, terms + strengths * size, v, taken, R, keep, D, one, rate)
        change, largest = _pass_on(terms, value, taken, y, before, out, D, zero)
        row(place(_tensor(job, CHANGE), b, t), 1, zero)[0] = change
        row(place(_tensor(job, SIZE), b, t), 1, zero)[0] = largest
        before = out


@njit(error_model="numpy")
def _work(counter, zero):
    job = carray(counter, (HEAD + 3 * TENSORS,))
    scratch = np.zeros((5 + job[RANK]) * job[CHANNELS] + job[RANK], row(0, 1, zero).dtype)
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
    """Fills out (B, T, D) with f(y), change and size (B, T) with each token's largest |f(y) - y| and |f(y)|.

    Args:
        rank: directions R.
        product: whether Q is the product of the reflections, or the identity less their sum.
        normalise: whether terms read y brought to unit root mean square, or y itself.
        raw: terms of the input (B, T, K), as [decay D | directions R D | strengths R | input D].
        decay_read: V y for the decay (B, T, D); None where it is 0.
        mixer_read: that for the channel mixer (B, T, R D + R).
        input_read: that for the input (B, T, D).
        x: input of the core (B, T, D).
        y: the last iterate (B, T, D).
        out: filled with the next one.
        change: filled, contiguous.
        size: filled, contiguous.
    """
    B, T, D = x.shape
    reads = [None if read is None else read.to(x.dtype) for read in (decay_read, mixer_read, input_read)]
    threads = max(1, min(torch.get_num_threads(), B, B * T * D // SMALLEST_SHARE))
    job = 0, B, T, D, rank, product, normalise, *layouts(raw, *reads, x, y, out, change, size)
    run(_worker(x.dtype), job, threads)
