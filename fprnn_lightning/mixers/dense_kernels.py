"""numba kernel of the dense recurrence: all of one time step but its matrix product, for FP-RNN's core and Householder.

Per sequence, with u_r = silu(n_r) / |silu(n_r)|, lambda and alpha the sigmoids of their raw terms, g = 1 - lambda:

    w = (1 + raw input) * x,                   v = lambda * (y_{t-1} - w),
    y_t = w + e,   e = v + g * U c,            c = K^-1 (alpha * U^T v),   s_t = y_t / rms(y_t)

with K of `channel_mixers/householder.py`; c_r = alpha_r u_r^T e_r are also the strengths by which the reflections act
on e, from the last to the first: (I - Q) e = U c. The backward step solves the transposed system for z = M^-T dy and
then differentiates p^T (I - Q) e, p = g * z, reflection by reflection.

Raw terms lie as [decay D | directions R D | strengths R | input D].
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from fprnn_lightning.channel_mixers.householder import SHORTEST
from fprnn_lightning.mixers.recurrent import NORM_EPSILON
from fprnn_lightning.scan.thread_kernels import ZEROS, compile_worker, pointer, run, take_ticket, version

SMALLEST_SHARE = 8192  # numbers of the state; below, waking a second core costs more than it saves

# Numbers are written in the tensors' dtype (`one`, `zero`, `size`): an int or float64 among them would widen the loops.
# Reassociation lets sums be vectorised; NaN and infinity keep their meaning, so that divergence is seen, and a division
# by zero gives them (error_model) instead of an exception that nobody could catch.
_FAST = {"reassoc", "contract", "arcp", "nsz"}


@njit(fastmath=_FAST, error_model="numpy")
def _solve_small(matrix, right):
    """Solves matrix @ solution = right in place of `right`, by elimination with pivoting: (R, R), (R,)."""
    size = right.shape[0]
    for i in range(size):
        pivot = i
        for j in range(i + 1, size):
            if abs(matrix[j, i]) > abs(matrix[pivot, i]):
                pivot = j
        if pivot != i:
            for k in range(size):
                matrix[i, k], matrix[pivot, k] = matrix[pivot, k], matrix[i, k]
            right[i], right[pivot] = right[pivot], right[i]
        for j in range(i + 1, size):
            ratio = matrix[j, i] / matrix[i, i]
            for k in range(i, size):
                matrix[j, k] -= ratio * matrix[i, k]
            right[j] -= ratio * right[i]
    for i in range(size - 1, -1, -1):
        for k in range(i + 1, size):
            right[i] -= matrix[i, k] * right[k]
        right[i] /= matrix[i, i]


@njit(fastmath=_FAST, error_model="numpy")
def _directions(raw, gate, u, inverse_norm, zero):
    """Fills u (R, D) with unit directions and inverse_norm (R,), from one token's raw terms and their sigmoids."""
    (rank, channels), one = u.shape, raw.dtype.type(1)
    for r in range(rank):
        start = channels * (1 + r)
        square = zero
        for d in range(channels):
            n = raw[start + d] * gate[start + d]
            u[r, d] = n
            square += n * n
        inverse_norm[r] = one / max(np.sqrt(square), raw.dtype.type(SHORTEST))
        for d in range(channels):
            u[r, d] *= inverse_norm[r]


@njit(fastmath=_FAST, error_model="numpy")
def _kernel_matrix(u, gate, strengths, kernel, zero):
    """Fills kernel (R, R) with K = I + diag(alpha) (striu(U^T U) - U^T diag(g) U)."""
    (rank, channels), one = u.shape, u.dtype.type(1)
    for i in range(rank):
        for j in range(rank):
            plain, gained = zero, zero
            for d in range(channels):
                product = u[i, d] * u[j, d]
                plain += product
                gained += product * (one - gate[d])
            kernel[i, j] = strengths[i] * ((plain if j > i else zero) - gained)
        kernel[i, i] += 1


@njit(fastmath=_FAST, error_model="numpy")
def _forward_token(b, t, rank, normalise, zero, raw, gate, x, y, s):
    """Fills y[b, t] and s[b, t] (B, T, D) from raw terms (B, T, K), their sigmoids without input's, and x (B, T, D)."""
    channels, one, size = x.shape[2], x.dtype.type(1), x.dtype.type(x.shape[2])
    u = np.empty((rank, channels), x.dtype)
    inverse_norm = np.empty(rank, x.dtype)
    kernel = np.empty((rank, rank), x.dtype)
    c = np.empty(rank, x.dtype)
    v = np.empty(channels, x.dtype)
    decay, value = gate[b, t], raw[b, t, -channels:]
    strengths = gate[b, t, -rank:]
    _directions(raw[b, t], decay, u, inverse_norm, zero)
    for d in range(channels):
        w = (one + value[d]) * x[b, t, d]
        before = y[b, t - 1, d] if t > 0 else zero
        v[d] = decay[d] * (before - w)
    for r in range(rank):
        dot = zero
        for d in range(channels):
            dot += u[r, d] * v[d]
        c[r] = strengths[r] * dot
    _kernel_matrix(u, decay, strengths, kernel, zero)
    _solve_small(kernel, c)
    for r in range(rank):
        for d in range(channels):
            v[d] += (one - decay[d]) * u[r, d] * c[r]
    square = zero
    for d in range(channels):
        new = (one + value[d]) * x[b, t, d] + v[d]
        y[b, t, d] = new
        square += new * new
    if normalise:
        inverse = one / np.sqrt(square / size + x.dtype.type(NORM_EPSILON))
        for d in range(channels):
            s[b, t, d] = y[b, t, d] * inverse


@njit(fastmath=_FAST, error_model="numpy")
def _backward_token(b, t, rank, normalise, zero, raw, gate, x, y, s, grad_y, grad_s, carry, grad_raw, grad_x):
    """Fills grad_raw[b, t] and grad_x[b, t], and turns `carry` (B, D), dy_t from later steps, into that of y_{t-1}.

    grad_y (B, T, D) is what comes from outside, grad_s (B, D) what the next step's gates say of s_t.
    """
    channels, one, size = x.shape[2], x.dtype.type(1), x.dtype.type(x.shape[2])
    u = np.empty((rank, channels), x.dtype)
    inverse_norm = np.empty(rank, x.dtype)
    kernel = np.empty((rank, rank), x.dtype)
    c = np.empty(rank, x.dtype)
    z = np.empty(channels, x.dtype)
    e = np.empty(channels, x.dtype)
    p = np.empty(channels, x.dtype)
    q = np.zeros(channels, x.dtype)
    decay, value = gate[b, t], raw[b, t, -channels:]
    strengths = gate[b, t, -rank:]
    _directions(raw[b, t], decay, u, inverse_norm, zero)

    # dy_t, with the gradient of s = y / sqrt(mean(y^2) + epsilon)
    for d in range(channels):
        z[d] = grad_y[b, t, d] + carry[b, d]
    if normalise:
        square, dot = zero, zero
        for d in range(channels):
            square += y[b, t, d] * y[b, t, d]
            dot += s[b, t, d] * grad_s[b, d]
        inverse = one / np.sqrt(square / size + x.dtype.type(NORM_EPSILON))
        for d in range(channels):
            z[d] += inverse * (grad_s[b, d] - s[b, t, d] * (dot / size))
    else:
        for d in range(channels):
            z[d] += grad_s[b, d]
    for d in range(channels):
        grad_x[b, t, d] = z[d]  # kept there until dw = dy - lambda * z below

    # z = M^-T dy = dy + U (alpha * K^-T U^T (g * dy))
    _kernel_matrix(u, decay, strengths, kernel, zero)
    for r in range(rank):
        dot = zero
        for d in range(channels):
            dot += u[r, d] * (one - decay[d]) * z[d]
        c[r] = dot
    _solve_small(kernel.T.copy(), c)
    for r in range(rank):
        for d in range(channels):
            z[d] += u[r, d] * strengths[r] * c[r]

    # e = y - w and q = (I - Q) e, whose reflections act from the last to the first
    for d in range(channels):
        e[d] = y[b, t, d] - (one + value[d]) * x[b, t, d]
        p[d] = (one - decay[d]) * z[d]
    for r in range(rank - 1, -1, -1):
        dot = zero
        for d in range(channels):
            dot += u[r, d] * e[d]
        c[r] = dot  # u_r^T e_r
        for d in range(channels):
            q[d] += strengths[r] * dot * u[r, d]
            e[d] -= strengths[r] * dot * u[r, d]

    # p^T (I - Q) e by its directions and strengths; e_r and p_r are what the other reflections have left
    for r in range(rank):
        start = channels * (1 + r)
        alpha, e_dot, p_dot = strengths[r], c[r], zero
        for d in range(channels):
            e[d] += alpha * e_dot * u[r, d]
            p_dot += u[r, d] * p[d]
        along = (alpha + alpha) * e_dot * p_dot if inverse_norm[r] < one / x.dtype.type(SHORTEST) else zero
        for d in range(channels):
            grad_u = alpha * (e_dot * p[d] + p_dot * e[d])
            sigmoid = gate[b, t, start + d]
            slope = sigmoid * (one + raw[b, t, start + d] * (one - sigmoid))
            grad_raw[b, t, start + d] = (grad_u - along * u[r, d]) * inverse_norm[r] * slope
            p[d] -= alpha * p_dot * u[r, d]
        grad_raw[b, t, channels * (1 + rank) + r] = e_dot * p_dot * alpha * (one - alpha)

    for d in range(channels):
        w = (one + value[d]) * x[b, t, d]
        before = y[b, t - 1, d] if t > 0 else zero
        grad_raw[b, t, d] = z[d] * (before - w - q[d]) * decay[d] * (one - decay[d])
        carry[b, d] = decay[d] * z[d]
        grad_w = grad_x[b, t, d] - carry[b, d]
        grad_raw[b, t, channels * (1 + rank) + rank + d] = grad_w * x[b, t, d]
        grad_x[b, t, d] = grad_w * (one + value[d])


@njit(error_model="numpy")
def _work(counter, zero):
    job = carray(counter, (19,))
    B, T, D, K, t, rank, normalise, backward = job[1:9]
    raw = carray(pointer(job[9], zero), (B, T, K))
    gate = carray(pointer(job[10], zero), (B, T, K - D))
    x = carray(pointer(job[11], zero), (B, T, D))
    y = carray(pointer(job[12], zero), (B, T, D))
    s = carray(pointer(job[13], zero), (B, T, D))
    grad_y = carray(pointer(job[14], zero), (B, T, D))
    grad_s = carray(pointer(job[15], zero), (B, D))
    carry = carray(pointer(job[16], zero), (B, D))
    grad_raw = carray(pointer(job[17], zero), (B, T, K))
    grad_x = carray(pointer(job[18], zero), (B, T, D))
    b = take_ticket(counter)
    while b < B:
        if backward:
            _backward_token(b, t, rank, normalise, zero, raw, gate, x, y, s, grad_y, grad_s, carry, grad_raw, grad_x)
        else:
            _forward_token(b, t, rank, normalise, zero, raw, gate, x, y, s)
        b = take_ticket(counter)


def _make_worker(zero, version):
    def work(counter):
        if version:
            _work(counter, zero)

    return work


@cache
def _worker(dtype: torch.dtype):
    return compile_worker(_make_worker(ZEROS[dtype], version(NORM_EPSILON, SHORTEST)))


def forward_step(
    t: int, rank: int, normalise: bool, raw: Tensor, gate: Tensor, x: Tensor, y: Tensor, s: Tensor
) -> None:
    """Fills y[:, t] and s[:, t] (B, T, D) from raw terms (B, T, K), their sigmoids without input's, and x (B, T, D)."""
    _run_step(t, rank, normalise, False, raw, gate, x, y, s)


def backward_step(t: int, rank: int, normalise: bool, *tensors: Tensor) -> None:
    """Fills grad_raw[:, t] and grad_x[:, t], and turns `carry`, dy_t from later steps, into that of y_{t-1}.

    Args:
        t: the time step.
        rank: reflections R.
        normalise: whether s is y brought to unit root mean square.
        *tensors: raw, gate, x, y, s as in `forward_step`; grad_y (B, T, D), what comes from outside; grad_s (B, D),
            what the next step's gates say of s_t; carry (B, D), grad_raw (B, T, K) and grad_x (B, T, D).
    """
    _run_step(t, rank, normalise, True, *tensors)


def _run_step(t: int, rank: int, normalise: bool, backward: bool, raw: Tensor, *tensors: Tensor) -> None:
    (B, T, K), D = raw.shape, tensors[1].shape[2]
    addresses = [tensor.data_ptr() for tensor in (raw, *tensors)]
    addresses += [0] * (10 - len(addresses))
    threads = max(1, min(torch.get_num_threads(), B * D // SMALLEST_SHARE))
    run(_worker(raw.dtype), (0, B, T, D, K, t, rank, normalise, backward, *addresses), threads)
