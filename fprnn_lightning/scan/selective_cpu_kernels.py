"""The selective scan on the CPU: lanes of vector registers are channels; what a step needs stays in the first cache.

    h_t = a_t h_{t-1} + B_t u_t,   y_t = C_t · h_t + D x_t,   a = exp(dt A),   u = dt x
    λ_t = C_t g_t + a_{t+1} λ_{t+1},   with q_t = a_t λ_t h_{t-1}, the gradient to dt_t A:
    du = Σ_n B λ    dx = dt du + D g    ddt = Σ_n A q + x du    dA = Σ_t dt q    dB = Σ_d λ u    dC = Σ_d g h

A block of WIDTH channels, padded with zeros where there are fewer, runs through all of time. Backward takes chunk
after chunk of steps, from the last to the first: it computes the chunk's decays and states anew from the boundary that
forward kept, into the second cache, then walks back over them.

Cores take pieces of work in turn: some blocks of one batch entry. The gradients of B and C are sums over channels: each
piece makes its own, to be added up in the end. Pieces depend on shapes alone, so results do not depend on the number of
cores.

A job (see `thread_kernels`) is HEAD numbers, then three per tensor. The numbers: a ticket counter; a second one, by
which threads share out scratch memory; its address, and the bytes of one thread's share; the bytes of a number; T, D,
N; how many decays a channel has, N or 1; channels per head; pieces in all, and of a batch entry; blocks of a piece. A
tensor: its address, and the bytes to the next batch entry and to the next step, chunk or state.

Scratch memory is rows of WIDTH numbers in groups: CHANNEL rows of the block, then STATE rows for each state, STEP rows
for each step at hand, then decays and states of these steps. That the rows of a group lie at fixed distances saves the
compiler from checking, each time, whether what is written overlaps what is read.
"""

import math
from functools import cache

import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic
from numpy import expm1, int64
from numpy.polynomial import Chebyshev, Polynomial
from torch import Tensor

from fprnn_lightning.scan.backends import carry_dtype
from fprnn_lightning.scan.rows import rows
from fprnn_lightning.scan.selective import CHUNK
from fprnn_lightning.scan.thread_kernels import ZEROS, compile_worker, place, pointer, row, run, take_ticket, version

WIDTH = 64
MOST_PIECES = 64  # of a job, unless the batch is larger: enough for some dozens of cores
SMALLEST_PIECE = 65536  # states computed; below, waking a second core costs more than it saves

# A job: numbers, then the tensors of forward or of backward
TICKET, SEAT, SCRATCH, SHARE, SIZE, STEPS, CHANNELS, STATES, DECAYS, HEAD_CHANNELS = range(10)
PIECES, BATCH_PIECES, PIECE_BLOCKS, HEAD = range(10, 14)
IN_X, IN_DT, IN_B, IN_C, IN_A, IN_D, BOUNDARIES, OUT_Y, OUT_LAST = range(9)
IN_GRAD, CARRIES, OUT_X, OUT_DT, OUT_B, OUT_C, OUT_A, OUT_D, TENSORS = range(7, 16)

CHANNEL, STATE, STEP = 3, 4, 7  # rows per group, which begin at
SKIP, SKIP_GRAD, SKIP_PART = range(0, CHANNEL * WIDTH, WIDTH)  # a PART is a sum over a chunk, for accuracy
RATE, CARRY, RATE_GRAD, RATE_PART = range(0, STATE * WIDTH, WIDTH)  # the carry is h in forward, a λ in backward
X, DT, EXPONENT, U, U_GRAD, DT_GRAD, OUT = range(0, STEP * WIDTH, WIDTH)  # OUT is y in forward, g in backward

LOG2_E = 1 / math.log(2)
# Polynomials for 2^f - 1, |f| ≤ 1/2, without the constant: nearly minimax for float32, Taylor's for float64.
_NEAR = Chebyshev.interpolate(lambda f: expm1(f * math.log(2)) / f, 5, [-0.5, 0.5]).convert(kind=Polynomial)
_TERMS = {32: [*_NEAR.coef], 64: [math.log(2) ** k / math.factorial(k) for k in range(1, 14)]}


def _exp2_parts(builder, x, constant):
    """Polynomial p(f), for a constant of 1, and power 2^k of 2^x = p(f) 2^k with k the integer next to x.

    Adding 1.5 2^mantissa + bias leaves k + bias in the lowest bits, which shifted to the exponent's place are 2^k.
    """
    real = x.type
    bits, mantissa = (32, 23) if real == ir.FloatType() else (64, 52)
    bias, integer = 2 ** (bits - mantissa - 2) - 1, ir.IntType(bits)
    multiply_add = builder.module.declare_intrinsic("llvm.fmuladd", [real], ir.FunctionType(real, [real] * 3))
    x = builder.select(builder.fcmp_ordered("<", x, real(-bias)), real(-bias), x)  # NaN stays
    x = builder.select(builder.fcmp_ordered(">", x, real(bias + 1)), real(bias + 1), x)
    shift = real(1.5 * 2**mantissa + bias)
    shifted = builder.fadd(x, shift)
    f = builder.fsub(x, builder.fsub(shifted, shift))
    *lower, p = map(real, map(float, [constant, *_TERMS[bits]]))
    for term in reversed(lower):
        p = builder.call(multiply_add, [p, f, term])
    return p, builder.bitcast(builder.shl(builder.bitcast(shifted, integer), integer(mantissa)), real), multiply_add


@intrinsic
def exp2(typingctx, z):
    """2^z to about one unit in the last place, without branches or calls.

    From half a binade before overflow on the result is inf, below the smallest normal number it is 0.
    """

    def generate(context, builder, signature, arguments):
        p, power, _ = _exp2_parts(builder, arguments[0], 1)
        return builder.fmul(p, power)

    return z(z), generate


@intrinsic
def exp2_minus_1(typingctx, z):
    """2^z - 1, as exact where it is small: (p(f) - 1) 2^k + (2^k - 1)."""

    def generate(context, builder, signature, arguments):
        p, power, multiply_add = _exp2_parts(builder, arguments[0], 0)
        return builder.call(multiply_add, [p, power, builder.fsub(power, power.type(1))])

    return z(z), generate


@intrinsic
def _prefetch(typingctx, address):
    """Asks for the cache line at an address, which need not exist."""

    def generate(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(arguments[0], pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.none(types.int64), generate


@njit
def _load(out, source, width, zero):
    """A row of a block from memory, padded with zeros."""
    out, source = row(out, WIDTH, zero), row(source, width, zero)
    for d in range(width):
        out[d] = source[d]
    for d in range(width, WIDTH):
        out[d] = zero


@njit
def _load_heads(out, source, first, width, channels, zero):
    """The same from memory that has one number per head of so many channels, for channels from the first on."""
    out, source = row(out, WIDTH, zero), row(source, (first + width - 1) // channels + 1, zero)
    head, left = first // channels, channels - first % channels
    for d in range(width):
        if left == 0:
            head, left = head + 1, channels
        out[d] = source[head]
        left -= 1
    for d in range(width, WIDTH):
        out[d] = zero


@njit
def _store(out, source, width, zero):
    """A row of a block to memory."""
    out, source = row(out, width, zero), row(source, width, zero)
    for d in range(width):
        out[d] = source[d]


@njit
def _begin_step(step, zero):
    """u = dt x, and dt as an exponent of 2."""
    s = row(step, STEP * WIDTH, zero)
    for d in range(WIDTH):
        s[U + d] = s[DT + d] * s[X + d]
        s[EXPONENT + d] = LOG2_E * s[DT + d]


@njit
def _begin_output(step, channel, zero):
    """y = D x."""
    s, c = row(step, STEP * WIDTH, zero), row(channel, CHANNEL * WIDTH, zero)
    for d in range(WIDTH):
        s[OUT + d] = c[SKIP + d] * s[X + d]


@njit
def _decay(decay, state, step, zero):
    """a = exp(dt A)."""
    a, n, s = row(decay, WIDTH, zero), row(state, STATE * WIDTH, zero), row(step, STEP * WIDTH, zero)
    for d in range(WIDTH):
        a[d] = exp2(s[EXPONENT + d] * n[RATE + d])


@njit(fastmath={"contract"})
def _forward_state(state, step, decay, B, C, zero):
    """h = a h + B u, y += C h."""
    n, s, a = row(state, STATE * WIDTH, zero), row(step, STEP * WIDTH, zero), row(decay, WIDTH, zero)
    for d in range(WIDTH):
        h = a[d] * n[CARRY + d] + B * s[U + d]
        n[CARRY + d] = h
        s[OUT + d] += C * h


@njit(fastmath={"contract", "reassoc", "nsz"})
def _forward_again(following, previous, step, decay, B, zero):
    """h' = a h + B u, and returns the sum of g h'."""
    after, h = row(following, WIDTH, zero), row(previous, WIDTH, zero)
    s, a = row(step, STEP * WIDTH, zero), row(decay, WIDTH, zero)
    total = zero
    for d in range(WIDTH):
        after[d] = a[d] * h[d] + B * s[U + d]
        total += s[OUT + d] * after[d]
    return total


@njit(fastmath={"contract", "reassoc", "nsz"})
def _backward_state(state, step, decay, previous, B, C, zero):
    """λ = C g + the carry, which becomes a λ;  du += B λ, dA += dt q, ddt += A q;  returns the sum of λ u."""
    n, s = row(state, STATE * WIDTH, zero), row(step, STEP * WIDTH, zero)
    a, h = row(decay, WIDTH, zero), row(previous, WIDTH, zero)
    total = zero
    for d in range(WIDTH):
        adjoint = C * s[OUT + d] + n[CARRY + d]
        total += adjoint * s[U + d]
        s[U_GRAD + d] += B * adjoint
        adjoint *= a[d]
        n[CARRY + d] = adjoint
        q = adjoint * h[d]
        n[RATE_PART + d] += s[DT + d] * q
        s[DT_GRAD + d] += n[RATE + d] * q
    return total


@njit(fastmath={"contract"})
def _end_step(step, channel, zero):
    """ddt += x du, dD += g x, and dx = dt du + D g in the place of du."""
    s, c = row(step, STEP * WIDTH, zero), row(channel, CHANNEL * WIDTH, zero)
    for d in range(WIDTH):
        s[DT_GRAD + d] += s[X + d] * s[U_GRAD + d]
        c[SKIP_PART + d] += s[OUT + d] * s[X + d]
        s[U_GRAD + d] = s[DT + d] * s[U_GRAD + d] + c[SKIP + d] * s[OUT + d]


@njit
def _end_chunk(sums, zero):
    """Adds a row, a sum over a chunk, to the one before."""
    sums = row(sums, 2 * WIDTH, zero)
    for d in range(WIDTH):
        sums[d] += sums[WIDTH + d]
        sums[WIDTH + d] = zero


@njit
def _tensor(job, i):
    return job[HEAD + 3 * i], job[HEAD + 3 * i + 1], job[HEAD + 3 * i + 2]


@njit
def _load_block(job, scratch, b, first, carry, zero):
    """A and D of the block and the carry that it starts from."""
    size, D, N = job[SIZE], job[CHANNELS], job[STATES]
    width, offset, states = min(D - first, WIDTH), first * size, scratch + CHANNEL * WIDTH * size
    _load(scratch, _tensor(job, IN_D)[0] + offset, width, zero)
    for n in range(N):
        state = states + n * STATE * WIDTH * size
        _load(state + RATE * size, _tensor(job, IN_A)[0] + n * D * size + offset, width, zero)
        _load(state + CARRY * size, carry + n * D * size + offset, width, zero)


@njit
def _store_rows(job, out, scratch, first, between, zero):
    """N rows that lie so many rows apart in scratch memory."""
    size, D, N = job[SIZE], job[CHANNELS], job[STATES]
    for n in range(N):
        _store(out + (n * D + first) * size, scratch + n * between * WIDTH * size, min(D - first, WIDTH), zero)


@njit
def _load_row(job, i, out, b, t, first, zero):
    """The row (b, t) of tensor i; has the one two steps later fetched, as rows are too far apart to be guessed."""
    source, size = place(_tensor(job, i), b, t) + first * job[SIZE], job[SIZE]
    _load(out, source, min(job[CHANNELS] - first, WIDTH), zero)
    later = source + 2 * job[HEAD + 3 * i + 2]
    for line in range(later, later + WIDTH * size, 64):
        _prefetch(line)


@njit
def _load_step(job, step, b, t, first, zero):
    size, channels = job[SIZE], job[HEAD_CHANNELS]
    _load_row(job, IN_X, step + X * size, b, t, first, zero)
    if channels == 1:
        _load_row(job, IN_DT, step + DT * size, b, t, first, zero)
    else:
        width = min(job[CHANNELS] - first, WIDTH)
        _load_heads(step + DT * size, place(_tensor(job, IN_DT), b, t), first, width, channels, zero)
    _begin_step(step, zero)


@njit
def _forward_block(job, scratch, piece, first, zero):
    size, T, D, N, decays = job[SIZE], job[STEPS], job[CHANNELS], job[STATES], job[DECAYS]
    b, line, boundaries = piece // job[BATCH_PIECES], WIDTH * size, _tensor(job, BOUNDARIES)
    states = scratch + CHANNEL * line
    step = states + N * STATE * line
    decay = step + STEP * line
    _load_block(job, scratch, b, first, place(boundaries, b, 0), zero)
    for t in range(T):
        if t % CHUNK == 0 and t > 0:
            _store_rows(job, place(boundaries, b, t // CHUNK), states + CARRY * size, first, STATE, zero)
        _load_step(job, step, b, t, first, zero)
        _begin_output(step, scratch, zero)
        for n in range(decays):
            _decay(decay + n * line, states + n * STATE * line, step, zero)
        B, C = row(place(_tensor(job, IN_B), b, t), N, zero), row(place(_tensor(job, IN_C), b, t), N, zero)
        for n in range(N):
            a = decay + min(n, decays - 1) * line
            _forward_state(states + n * STATE * line, step, a, B[n], C[n], zero)
        _store(place(_tensor(job, OUT_Y), b, t) + first * size, step + OUT * size, min(D - first, WIDTH), zero)
    _store_rows(job, place(_tensor(job, OUT_LAST), b, 0), states + CARRY * size, first, STATE, zero)


@njit
def _backward_block(job, scratch, piece, first, zero):
    size, T, D, N, decays = job[SIZE], job[STEPS], job[CHANNELS], job[STATES], job[DECAYS]
    b, line, width = piece // job[BATCH_PIECES], WIDTH * size, min(D - first, WIDTH)
    is_first = first == _blocks(job, piece).start  # of the blocks whose sums over channels are added up
    states = scratch + CHANNEL * line
    steps = states + N * STATE * line
    decay = steps + CHUNK * STEP * line
    h = decay + CHUNK * decays * line
    row(scratch, (CHANNEL + N * STATE) * WIDTH, zero)[:] = zero
    _load_block(job, scratch, b, first, place(_tensor(job, CARRIES), b, 0), zero)
    for start in range((T - 1) // CHUNK * CHUNK, -1, -CHUNK):
        end = min(start + CHUNK, T)
        boundary = place(_tensor(job, BOUNDARIES), b, start // CHUNK) + first * size
        for n in range(N):
            _load(h + n * line, boundary + n * D * size, width, zero)
        for i in range(end - start):
            t, step = start + i, steps + i * STEP * line
            _load_step(job, step, b, t, first, zero)
            _load_row(job, IN_GRAD, step + OUT * size, b, t, first, zero)
            for n in range(decays):
                _decay(decay + (i * decays + n) * line, states + n * STATE * line, step, zero)
            B, C_grad = (
                row(place(_tensor(job, IN_B), b, t), N, zero),
                row(place(_tensor(job, OUT_C), piece, t), N, zero),
            )
            for n in range(N):
                previous, a = h + (i * N + n) * line, decay + (i * decays + min(n, decays - 1)) * line
                total = _forward_again(previous + N * line, previous, step, a, B[n], zero)
                C_grad[n] = total if is_first else C_grad[n] + total
        for i in range(end - start - 1, -1, -1):
            t, step = start + i, steps + i * STEP * line
            row(step + U_GRAD * size, 2 * WIDTH, zero)[:] = zero  # and DT_GRAD, next to it
            B, C = row(place(_tensor(job, IN_B), b, t), N, zero), row(place(_tensor(job, IN_C), b, t), N, zero)
            B_grad = row(place(_tensor(job, OUT_B), piece, t), N, zero)
            for n in range(N):
                previous, a = h + (i * N + n) * line, decay + (i * decays + min(n, decays - 1)) * line
                total = _backward_state(states + n * STATE * line, step, a, previous, B[n], C[n], zero)
                B_grad[n] = total if is_first else B_grad[n] + total
            _end_step(step, scratch, zero)
            _store(place(_tensor(job, OUT_X), b, t) + first * size, step + U_GRAD * size, width, zero)
            _store(place(_tensor(job, OUT_DT), b, t) + first * size, step + DT_GRAD * size, width, zero)
        _end_chunk(scratch + SKIP_GRAD * size, zero)
        for n in range(N):
            _end_chunk(states + n * STATE * line + RATE_GRAD * size, zero)
    _store_rows(job, place(_tensor(job, CARRIES), b, 0), states + CARRY * size, first, STATE, zero)
    _store_rows(job, place(_tensor(job, OUT_A), b, 0), states + RATE_GRAD * size, first, STATE, zero)
    _store(place(_tensor(job, OUT_D), b, 0) + first * size, scratch + SKIP_GRAD * size, width, zero)


@njit
def _open(counter):
    """The numbers of the job, and the address of this thread's scratch memory."""
    job = carray(counter, (HEAD + 3 * TENSORS,))
    return job, job[SCRATCH] + job[SHARE] * take_ticket(pointer(job.ctypes.data + 8, int64(0)))


@njit
def _blocks(job, piece):
    """The first channel of each block of a piece."""
    start = piece % job[BATCH_PIECES] * job[PIECE_BLOCKS] * WIDTH
    return range(start, min(start + job[PIECE_BLOCKS] * WIDTH, job[CHANNELS]), WIDTH)


@njit
def _forward_pieces(counter, zero):
    job, scratch = _open(counter)
    piece = take_ticket(counter)
    while piece < job[PIECES]:
        for first in _blocks(job, piece):
            _forward_block(job, scratch, piece, first, zero)
        piece = take_ticket(counter)


@njit
def _backward_pieces(counter, zero):
    job, scratch = _open(counter)
    piece = take_ticket(counter)
    while piece < job[PIECES]:
        for first in _blocks(job, piece):
            _backward_block(job, scratch, piece, first, zero)
        piece = take_ticket(counter)


def _make_worker(backward, zero, version):
    def work_forward(counter):
        if version:
            _forward_pieces(counter, zero)

    def work_backward(counter):
        if version:
            _backward_pieces(counter, zero)

    return work_backward if backward else work_forward


@cache
def _worker(backward: bool, dtype: torch.dtype):
    return compile_worker(_make_worker(backward, ZEROS[dtype], version(CHUNK)))


def _pieces(batch: int, channels: int) -> tuple[int, int]:
    """Into how many pieces a batch entry is cut, and of how many blocks each."""
    blocks = -(-channels // WIDTH)
    each = max(1, min(blocks, -(-blocks * batch // MOST_PIECES)))
    return -(-blocks // each), each


def _run(backward: bool, M: int, *tensors: Tensor) -> None:
    """Runs one job, tensors in its order and M decays per channel, on as many cores as torch uses."""
    x, dt, B, *_ = tensors
    (batch, T, D), N, size = x.shape, B.shape[2], x.element_size()
    if batch * D == 0:
        return
    pieces, blocks = _pieces(batch, D)
    threads = max(1, min(torch.get_num_threads(), batch * pieces, batch * T * D * N // SMALLEST_PIECE))
    scratch_rows = CHANNEL + N * STATE + (CHUNK * (STEP + M + N) + N if backward else STEP + M)
    scratch = x.new_empty(threads, scratch_rows, WIDTH)
    numbers = (
        scratch.data_ptr(),
        scratch_rows * WIDTH * size,
        size,
        T,
        D,
        N,
        M,
        D // dt.shape[2],
        batch * pieces,
        pieces,
        blocks,
    )
    layouts = (number for tensor in tensors for number in _layout(tensor))
    run(_worker(backward, x.dtype), (0, 0, *numbers, *layouts), threads)


def _layout(x: Tensor) -> tuple[int, int, int]:
    """Address, and the bytes to the next batch entry and the next step, which are the first two axes."""
    batch, time = (*x.stride(), 0)[:2]
    return x.data_ptr(), batch * x.element_size(), time * x.element_size()


def _prepare(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> list[Tensor]:
    """x (B, T, D), dt, B, C, the A (N, D) and D (D,), in the dtype in which the state is carried."""
    dtype = carry_dtype(x.dtype)
    A = A.to(dtype).expand(-1, B.shape[2]).t().repeat_interleave(x.shape[3], dim=1).contiguous()
    D = x.new_zeros(A.shape[1], dtype=dtype) if D is None else D.to(dtype).flatten().contiguous()
    return [*(rows(tensor.to(dtype)) for tensor in (x, dt, B, C)), A, D]


def _states(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, H, P, N) as (B, N, D)."""
    return x.to(dtype).movedim(3, 1).flatten(2)


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states (B, chunks, N, H P) before each chunk of steps; see selective_reference."""
    inputs = _prepare(x, dt, A, B, C, D)
    batch, T, channels = inputs[0].shape
    boundaries = inputs[0].new_empty(batch, -(-T // CHUNK), B.shape[2], channels)
    boundaries[:, 0] = 0 if initial is None else _states(initial, boundaries.dtype)
    y, last = boundaries.new_empty(batch, T, channels), torch.empty_like(boundaries[:, 0])
    _run(False, A.shape[1], *inputs, boundaries, y, last)
    last = last.unflatten(2, x.shape[2:]).movedim(1, 3).contiguous()
    return y.view(x.shape).to(x.dtype), last, boundaries


def backward(
    grad_y: Tensor,
    grad_last: Tensor,
    boundaries: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients to the inputs, None where that is None; see selective_reference."""
    inputs, dtype = _prepare(x, dt, A, B, C, D), boundaries.dtype
    batch, T, heads, width = x.shape
    channels, N, pieces = heads * width, B.shape[2], _pieces(batch, heads * width)[0]
    carry = _states(grad_last, dtype).clone(memory_format=torch.contiguous_format)
    grad_x, grad_dt = boundaries.new_empty(batch, T, channels), boundaries.new_empty(batch, T, channels)
    grad_B, grad_C = boundaries.new_empty(2, batch * pieces, T, N)
    grad_A, grad_D = boundaries.new_empty(batch, N, channels), boundaries.new_empty(batch, channels)
    results = carry, grad_x, grad_dt, grad_B, grad_C, grad_A, grad_D
    _run(True, A.shape[1], *inputs, boundaries, rows(grad_y.to(dtype)), *results)
    grad_dt = grad_dt.view(x.shape)
    gradients = (
        grad_x.view(x.shape),
        grad_dt.squeeze(3) if width == 1 else grad_dt.sum(3),
        grad_A.sum(0).view(N, heads, width).sum(2).t().sum_to_size(A.shape),
        grad_B.view(batch, pieces, T, N).sum(1),
        grad_C.view(batch, pieces, T, N).sum(1),
        grad_D.sum(0).view(heads, width),
        carry.unflatten(2, x.shape[2:]).movedim(1, 3),
    )
    return tuple(
        None if tensor is None else gradient.to(tensor.dtype).contiguous()
        for gradient, tensor in zip(gradients, (x, dt, A, B, C, D, initial), strict=True)
    )
