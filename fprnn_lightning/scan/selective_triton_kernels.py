"""The selective scan on a GPU in Triton, forward and backward.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_tᵀ        y_t = h_t C_t + D x_t

A sweep walks over time with the states of a few channels in registers. Forward it writes y and the state before each
chunk; backward, from the last step to the first, the adjoint after each chunk: m_t = a_t λ_t with a_t = exp(dt_t A) and
λ_t = m_{t+1} + C_t g_t. Then every chunk has the two states that it lies between, and all can be worked on at once by
`gradient_kernel`, which walks through the channels, so that what B and C take from all of them is summed in registers.

A tile of states is (K, G, channels): n = g K + k, with time and K in the registers of one thread and G × channels over
the threads of one warp, so that little is passed between threads: log2 G values per step and channel for a sum over N.
Few long sequences are cut in time: each program first sums its segment up (its end state from zero, its whole decay
exp(A Σ dt)), receives the state before it from the program before, hands its own on, and sweeps.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fprnn_lightning.scan.backends import carry_dtype
from fprnn_lightning.scan.lookback_kernels import hand_over, new_workspace, processors, receive, take_ticket
from fprnn_lightning.scan.selective import CHUNK

PROGRAMS_PER_PROCESSOR = 8  # of one warp each, to keep a GPU busy
WARP = 64 if torch.version.hip else 32
MOST_REGISTERS = {} if torch.version.hip else {"maxnreg": 255}  # rather than a few spilled to run one more warp
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _read(pointers, mask, like):
    return tl.load(pointers, mask=mask, other=0).to(like.dtype)


@triton.jit
def _over_states(v):
    """(channels,) as (1, 1, channels), in the layout that _sum_states leaves: nothing is moved or read twice."""
    return tl.expand_dims(tl.expand_dims(v, 0), 0)


@triton.jit
def _sum_states(v):
    return tl.sum(tl.sum(v, 0), 0)


@triton.jit
def _write(pointers, v, n, mask):
    """Stores (channels,) by the threads that hold state 0: a store of its own shape would have a layout of its own."""
    mask = (n == 0)[:, :, None] & _over_states(mask)
    pointers = _over_states(pointers) + 0 * n[:, :, None]  # the interpreter cannot store what tl.broadcast returns
    v = tl.where((n >= 0)[:, :, None], _over_states(v), 0)
    tl.store(pointers, v.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _state_numbers(BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr):
    """(K, G)"""
    return (tl.arange(0, BLOCK_K)[:, None] + BLOCK_K * tl.arange(0, BLOCK_G)[None, :]).to(tl.int64)


@triton.jit
def _channel_numbers(block, channels, P, BLOCK_D: tl.constexpr):
    """The channels of a block, which of them exist, and their heads."""
    channel = block * BLOCK_D + tl.arange(0, BLOCK_D)
    return channel.to(tl.int64), channel < channels, (channel // P).to(tl.int64)


@triton.jit
def _rates(A, A_h, A_n, head, n, is_channel, mask, like):
    """A log2 e for exp2, (K, G, channels), or (1, 1, channels) where all states of a head decay alike."""
    if A_n is None:
        rates = _over_states(_read(A + head * A_h, is_channel, like))
    else:
        rates = _read(A + (n * A_n)[:, :, None] + _over_states(head * A_h), mask, like)
    return rates * LOG2_E


@triton.jit
def _run(
    state, rates, values, dt, weights, readout, skip, y, boundaries,
    values_t, dt_t, weights_t, readout_t, y_t, boundaries_t, n, is_state, is_channel, T, first, end, lead,
    REVERSE: tl.constexpr, WRITE: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Steps first to end, in the order of the scan, on from a state; returns the last state and the sum of dt.

    Pointers are to step 0 of the scan, where the first `lead` steps and those from `lead` + T on do not exist.
    """
    elapsed = tl.zeros(is_channel.shape, state.dtype)
    for start in range(first, end, STEPS):
        begin = tl.cast(start, tl.int64)
        if WRITE and start % CHUNK == 0:
            mask = is_state[:, :, None] & _over_states(is_channel)
            tl.store(boundaries + begin // CHUNK * boundaries_t, state, mask=mask)
        values_at, dt_at, weights_at = values + begin * values_t, dt + begin * dt_t, weights + begin * weights_t
        outputs = ()
        for i in tl.static_range(STEPS):
            exists = (start + i >= lead) & (start + i < lead + T)
            value = _read(values_at + i * values_t, is_channel & exists, state)
            size = _read(dt_at + i * dt_t, is_channel & exists, state)
            weight = _read(weights_at + i * weights_t, is_state & exists, state)[:, :, None]
            elapsed += size
            decay = tl.exp2(_over_states(size) * rates)
            if REVERSE:
                state = decay * (state + weight * _over_states(value))
            else:
                state = decay * state + weight * _over_states(size * value)
            if WRITE and not REVERSE:
                read = _read(readout + (begin + i) * readout_t, is_state & exists, state)[:, :, None]
                outputs = outputs + (_sum_states(read * state) + skip * value,)  # noqa: RUF005
        if WRITE and not REVERSE:
            for i in tl.static_range(STEPS):
                _write(y + (begin + i) * y_t, outputs[i], n, is_channel & (start + i < T))
    return state, elapsed


@triton.jit(do_not_specialize=["batch", "T", "channels", "chunks", "span"])
def sweep_kernel(
    values, dt, A, weights, readout, D, initial, y, boundaries, last, slots, counter,
    values_b, values_t, values_d, dt_b, dt_t, dt_h, A_h, A_n, weights_b, weights_t, weights_n,
    readout_b, readout_t, readout_n, D_d, initial_b, initial_d, initial_n,
    batch, T, channels, P, chunks, span,
    N: tl.constexpr, REVERSE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Forward: values x, weights B, readout C. Reversed: values the gradient to y, weights C, initial that to last."""
    blocks = tl.cdiv(channels, BLOCK_D)
    program = tl.program_id(0) if slots is None else take_ticket(counter)
    segment, b, block = program // (batch * blocks), (program // blocks % batch).to(tl.int64), program % blocks
    n = _state_numbers(BLOCK_K, BLOCK_G)
    channel, is_channel, head = _channel_numbers(block, channels, P, BLOCK_D)
    is_state = n < N
    mask = is_state[:, :, None] & _over_states(is_channel)
    row = tl.cast(N, tl.int64) * channels
    place = (n * channels)[:, :, None] + _over_states(channel)

    zero = tl.zeros((BLOCK_K, BLOCK_G, BLOCK_D), last.dtype.element_ty)
    rates = _rates(A, A_h, A_n, head, n, is_channel, mask, zero)
    values += b * values_b + channel * values_d
    dt += b * dt_b + head * dt_h
    weights += b * weights_b + n * weights_n
    boundaries += b * chunks * row + place
    skip = 0.0
    lead = 0
    if REVERSE:
        lead = chunks * CHUNK - T
        final = (chunks * CHUNK).to(tl.int64) - 1
        values, values_t = values + final * values_t, -values_t
        dt, dt_t = dt + final * dt_t, -dt_t
        weights, weights_t = weights + final * weights_t, -weights_t
        boundaries, row_t = boundaries + (chunks - 1) * row, -row
    else:
        row_t = row
        readout += b * readout_b + n * readout_n
        y += b * T * channels + channel
        if D is not None:
            skip = _read(D + channel * D_d, is_channel, zero)

    before = zero
    first, end = segment * span, min((segment + 1) * span, chunks)
    if initial is not None:
        pointers = initial + b * initial_b + (n * initial_n)[:, :, None] + _over_states(channel * initial_d)
        before = _read(pointers, mask & (segment == 0), zero)
    if slots is not None:
        offset, elapsed = _run(
            zero, rates, values, dt, weights, readout, skip, y, boundaries,
            values_t, dt_t, weights_t, readout_t, channels, row_t, n, is_state, is_channel, T,
            first * CHUNK, end * CHUNK, lead, REVERSE, False, CHUNK, STEPS,
        )  # fmt: skip
        slots += b * row + place
        if segment > 0:
            before = receive(slots + (segment - 1) * batch * row, mask)
        if end < chunks:
            whole = tl.exp2(_over_states(elapsed) * rates)  # may overflow
            carried = tl.where(before == 0, 0, whole * before)
            hand_over(slots + segment * batch * row, carried + offset, mask)
    state, _ = _run(
        before, rates, values, dt, weights, readout, skip, y, boundaries,
        values_t, dt_t, weights_t, readout_t, channels, row_t, n, is_state, is_channel, T,
        first * CHUNK, end * CHUNK, lead, REVERSE, True, CHUNK, STEPS,
    )  # fmt: skip
    if end == chunks:
        tl.store(last + b * row + n[:, :, None] + _over_states(channel * N), state, mask=mask)


@triton.jit
def _step(state, rates, x, dt, B, is_channel):
    """The state after a step."""
    size, value = _read(dt, is_channel, state), _read(x, is_channel, state)
    weight = tl.load(B).to(state.dtype)[:, :, None]
    return tl.exp2(_over_states(size) * rates) * state + weight * _over_states(size * value)


@triton.jit(do_not_specialize=["batch", "T", "channels", "chunks", "spans", "span", "blocks"])
def gradient_kernel(
    grad_y, x, dt, A, B_and_C, D, boundaries, adjoints, grad_x, grad_dt, grad_B, grad_C, sums,
    grad_b, grad_t, grad_d, x_b, x_t, x_d, dt_b, dt_t, dt_h, A_h, A_n, D_d,
    batch, T, channels, P, chunks, spans, span, blocks,
    N: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A span of chunks, the last first, for a group of blocks of channels.

    A chunk is worked on in parts of STEPS, the last first, for whose steps the registers hold all that is summed over
    channels. The adjoint after a part overwrites that after the chunk. Gradients to A, one row per state, and to D, the
    row after these, are summed over the span in memory.
    """
    program = tl.program_id(0)
    group, b, piece = program // (batch * spans), (program // spans % batch).to(tl.int64), program % spans
    last_block = min((group + 1) * blocks, tl.cdiv(channels, BLOCK_D))
    n = _state_numbers(BLOCK_K, BLOCK_G)
    is_state = n < N
    zero = tl.zeros((BLOCK_K, BLOCK_G, BLOCK_D), boundaries.dtype.element_ty)
    sums += (b * spans + piece) * ((1 if A_n is None else N) + 1) * channels
    grad_y, x, dt = grad_y + b * grad_b, x + b * x_b, dt + b * dt_b
    grad_x, grad_dt = grad_x + b * T * channels, grad_dt + b * T * channels
    BLOCK_N: tl.constexpr = BLOCK_K * BLOCK_G
    B_and_C += b * chunks * CHUNK * 2 * BLOCK_N + n
    grad_B += (group * batch + b) * T * N + n
    grad_C += (group * batch + b) * T * N + n
    parts = CHUNK // STEPS
    end = min((piece + 1) * span * parts, tl.cdiv(T, STEPS))
    for back in range(0, end - piece * span * parts):
        start = ((end - 1 - back) * STEPS).to(tl.int64)
        chunk = start // CHUNK
        sum_B, sum_C = (), ()
        for _ in tl.static_range(STEPS):
            sum_B, sum_C = sum_B + (zero,), sum_C + (zero,)  # noqa: RUF005
        for block in range(group * blocks, last_block):
            channel, is_channel, head = _channel_numbers(block, channels, P, BLOCK_D)
            mask = is_state[:, :, None] & _over_states(is_channel)
            place = (b * chunks + chunk) * N * channels + (n * channels)[:, :, None] + _over_states(channel)
            rates = _rates(A, A_h, A_n, head, n, is_channel, mask, zero)
            skip = tl.zeros([BLOCK_D], zero.dtype)
            if D is not None:
                skip = _read(D + channel * D_d, is_channel, zero)
            state = tl.load(boundaries + place, mask=mask, other=0)
            left = tl.where(is_channel, (T - start).to(tl.int32), -CHUNK)
            x_at, dt_at = x + channel * x_d, dt + head * dt_h
            begin, before = chunk * CHUNK, (start % CHUNK).to(tl.int32)
            x_at, dt_at, B_at = x_at + begin * x_t, dt_at + begin * dt_t, B_and_C + begin * 2 * BLOCK_N
            for i in range(before):
                state = _step(state, rates, x_at, dt_at, B_at, i - before < left)
                x_at, dt_at, B_at = x_at + x_t, dt_at + dt_t, B_at + 2 * BLOCK_N
            grad_at = grad_y + (start + STEPS - 1) * grad_t + channel * grad_d
            states = (state,)
            for i in tl.static_range(STEPS):
                state = _step(state, rates, x_at, dt_at, B_at + i * 2 * BLOCK_N, i < left)
                x_at, dt_at, states = x_at + x_t, dt_at + dt_t, states + (state,)  # noqa: RUF005
            tl.debug_barrier()
            adjoint = tl.load(adjoints + place, mask=mask, other=0)
            sum_A = tl.zeros_like(rates)
            sum_D = tl.zeros_like(skip)
            after = (start + STEPS) * channels + channel
            grad_x_at, grad_dt_at = grad_x + after, grad_dt + after
            new_B, new_C = (), ()
            for i in tl.static_range(STEPS - 1, -1, -1):
                grad = _read(grad_at, i < left, zero)
                x_at, dt_at, grad_at = x_at - x_t, dt_at - dt_t, grad_at - grad_t
                size, value = _read(dt_at, i < left, zero), _read(x_at, i < left, zero)
                weight = tl.load(B_at + i * 2 * BLOCK_N).to(zero.dtype)[:, :, None]
                read = tl.load(B_at + (i * 2 + 1) * BLOCK_N).to(zero.dtype)[:, :, None]
                grad_state = adjoint + read * _over_states(grad)
                adjoint = tl.exp2(_over_states(size) * rates) * grad_state
                grad_drive = _sum_states(grad_state * weight)
                grad_log = adjoint * states[i]
                if A_n is None:
                    grad_log = _over_states(_sum_states(grad_log))
                sum_A += _over_states(size) * grad_log
                sum_D += grad * value
                new_B = (sum_B[i] + grad_state * _over_states(size * value),) + new_B  # noqa: RUF005
                new_C = (sum_C[i] + states[i + 1] * _over_states(grad),) + new_C  # noqa: RUF005
                grad_x_at, grad_dt_at = grad_x_at - channels, grad_dt_at - channels
                _write(grad_x_at, size * grad_drive + skip * grad, n, i < left)
                _write(grad_dt_at, _sum_states(grad_log * rates) * LN_2 + value * grad_drive, n, i < left)
            sum_B, sum_C = new_B, new_C
            tl.store(adjoints + place, adjoint, mask=mask)
            if A_n is None:
                place_A = _over_states(channel)
                mask = _over_states(is_channel)
                place_D = channels + channel
            else:
                place_A = (n * channels)[:, :, None] + _over_states(channel)
                place_D = N * channels + channel
            if back > 0:
                sum_A += tl.load(sums + place_A, mask=mask, other=0)
                sum_D += tl.load(sums + place_D, mask=is_channel, other=0)
            tl.store(sums + place_A, sum_A, mask=mask)
            _write(sums + place_D, sum_D, n, is_channel)
        for i in tl.static_range(STEPS):
            wanted = is_state & (start + i < T)
            tl.store(grad_B + (start + i) * N, tl.sum(sum_B[i], 2).to(grad_B.dtype.element_ty), mask=wanted)
            tl.store(grad_C + (start + i) * N, tl.sum(sum_C[i], 2).to(grad_C.dtype.element_ty), mask=wanted)
        tl.debug_barrier()  # the next part reads what this one wrote, perhaps by other threads


def sweep_sizes(N: int, warp: int) -> dict[str, int]:
    """A tile of one warp, up to 8 states per thread, more only where there are no more threads."""
    return _sizes(N, warp, 8) | {"STEPS": CHUNK // 8}


def gradient_sizes(N: int, warp: int) -> dict[str, int]:
    """A tile of one warp, two states per thread if possible; steps for whose sums there are registers."""
    sizes = _sizes(N, warp, 2)
    return sizes | {"STEPS": min(CHUNK // 4, max(1, CHUNK // 2 // sizes["BLOCK_K"]))}


def _sizes(N: int, warp: int, per_thread: int) -> dict[str, int]:
    states = triton.next_power_of_2(N)
    threads = min(max(1, states // per_thread), warp)
    return {"BLOCK_K": states // threads, "BLOCK_G": threads, "BLOCK_D": warp // threads}


def _span(chunks: int, rows: int, device: torch.device) -> int:
    """Chunks per segment of a sweep; cutting takes twice the work, and so is worth it only from 4 segments on.

    Nor are there more segments than let the handing over, one after another, take as long as the work of each.
    """
    segments = min(PROGRAMS_PER_PROCESSOR * processors(device) // rows, math.isqrt(chunks * CHUNK // 2), chunks)
    return triton.cdiv(chunks, segments) if segments >= 4 else chunks


def _groups(batch: int, chunks: int, channels: int, N: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts the channels and the chunks are cut for the gradients.

    No more parts of channels than let the sums that each has for B and C take half the size of x in all.
    """
    wanted = triton.cdiv(4 * PROGRAMS_PER_PROCESSOR * processors(device), batch)
    groups = min(max(1, channels // (4 * N)), triton.cdiv(wanted, chunks))
    return groups, min(chunks, triton.cdiv(wanted, groups))


def _sweep_over(values, dt, A, weights, initial, last, boundaries, readout=None, D=None, y=None):
    """Launches a sweep, reversed unless there is an output to read from the states."""
    if values.numel() == 0:
        return
    batch, T, channels = values.shape
    N, chunks = weights.shape[2], boundaries.shape[1]
    sizes = sweep_sizes(N, WARP)
    rows = batch * triton.cdiv(channels, sizes["BLOCK_D"])
    span = _span(chunks, rows, values.device)
    segments = triton.cdiv(chunks, span)
    slots = new_workspace((segments - 1) * batch * channels * N, last) if segments > 1 else None
    with torch.cuda.device_of(values):
        sweep_kernel[(segments * rows,)](
            values, dt, A, weights, readout, D, initial, y, boundaries, last,
            slots, None if slots is None else slots[-1:],
            *values.stride(), *dt.stride(), *_rate_strides(A), *weights.stride(),
            *_strides(readout, 3), *_strides(D, 1), *_strides(initial, 3),
            batch, T, channels, channels // dt.shape[2], chunks, span,
            N=N, REVERSE=y is None, CHUNK=CHUNK, **sizes, num_warps=1,
        )  # fmt: skip


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states before each chunk (B, chunks, N, H P); see selective_reference.forward."""
    batch, T, heads, width = x.shape
    N, channels = B.shape[2], heads * width
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    last = x.new_empty(batch, heads, width, N, dtype=carry_dtype(x.dtype))
    boundaries = last.new_empty(batch, triton.cdiv(T, CHUNK), N, channels)
    D = None if D is None else D.reshape(channels)
    initial = None if initial is None else initial.reshape(batch, channels, N)
    _sweep_over(x.reshape(batch, T, channels), dt, A, B, initial, last, boundaries, C, D, y)
    return y, last, boundaries


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
    """Gradients to x, dt, A, B, C, D, initial, None where that is None; see selective_reference.backward."""
    if x.numel() == 0:
        return tuple(None if tensor is None else torch.zeros_like(tensor) for tensor in (x, dt, A, B, C, D, initial))
    batch, T, heads, width = x.shape
    N, channels, chunks = B.shape[2], heads * width, boundaries.shape[1]
    grad, x_rows = grad_y.reshape(batch, T, channels), x.reshape(batch, T, channels)
    skip = None if D is None else D.reshape(channels)
    first, adjoints = boundaries.new_empty(batch, heads, width, N), torch.empty_like(boundaries)
    _sweep_over(grad, dt, A, C, grad_last.reshape(batch, channels, N), first, adjoints)

    sizes = gradient_sizes(N, WARP)
    blocks = triton.cdiv(channels, sizes["BLOCK_D"])
    groups, spans = _groups(batch, chunks, channels, N, x.device)
    blocks, span = triton.cdiv(blocks, groups), triton.cdiv(chunks, spans)
    groups, spans = triton.cdiv(triton.cdiv(channels, sizes["BLOCK_D"]), blocks), triton.cdiv(chunks, span)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_dt = x.new_empty(batch, T, heads, width, dtype=dt.dtype if width == 1 else boundaries.dtype)
    grad_B = B.new_empty(groups, batch, T, N, dtype=B.dtype if groups == 1 else boundaries.dtype)
    grad_C = C.new_empty(groups, batch, T, N, dtype=C.dtype if groups == 1 else boundaries.dtype)
    width_N = triton.next_power_of_2(N)
    B_and_C = B.new_zeros(batch, chunks * CHUNK, 2, width_N, dtype=torch.promote_types(B.dtype, C.dtype))
    B_and_C[:, :T, 0, :N], B_and_C[:, :T, 1, :N] = B, C
    sums = boundaries.new_empty(batch * spans, A.shape[1] + 1, channels)
    with torch.cuda.device_of(x):
        gradient_kernel[(groups * batch * spans,)](
            grad, x_rows, dt, A, B_and_C, skip, boundaries, adjoints, grad_x, grad_dt, grad_B, grad_C, sums,
            *grad.stride(), *x_rows.stride(), *dt.stride(), *_rate_strides(A),
            *_strides(skip, 1), batch, T, channels, width, chunks, spans, span, blocks,
            N=N, CHUNK=CHUNK, **sizes, num_warps=1, **MOST_REGISTERS,
        )  # fmt: skip
    sums = sums.sum(0)
    return (
        grad_x,
        _sum(grad_dt, 3, dt.dtype),
        sums[:-1].view(-1, heads, width).sum(2).t().to(A.dtype).contiguous(),
        _sum(grad_B, 0, B.dtype),
        _sum(grad_C, 0, C.dtype),
        None if D is None else sums[-1].view(heads, width).to(D.dtype, copy=True),
        None if initial is None else first.to(initial.dtype),
    )


def _sum(parts: Tensor, axis: int, dtype: torch.dtype) -> Tensor:
    return parts.squeeze(axis) if parts.shape[axis] == 1 else parts.sum(axis).to(dtype)


def _rate_strides(A: Tensor) -> tuple[int, int | None]:
    return A.stride(0), A.stride(1) if A.shape[1] > 1 else None


def _strides(tensor: Tensor | None, axes: int) -> tuple[int | None, ...]:
    return (None,) * axes if tensor is None else tensor.stride()
