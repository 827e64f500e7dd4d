"""The linear scan h_t = decay_t h_{t-1} + drive_t on the CPU at memory bandwidth: forward, and backward in one sweep.

Cores take pieces of some whole sequences in turn. Where these are too few to go round, the B·T rows of D channels are
cut into one piece per core. A piece that begins inside a sequence starts from a state of zero; when all are done such
pieces are mended: run again from the true state until a row comes out as it already stands, from where on every later
row is right. With decays below one that happens soon, and always the result is, bit for bit, that of the loop over
time. (Cores that share rows instead, each with some of the channels, disturb each other's prefetching: at B = 1 two are
then slower than one.)

Results that no cache will keep are written past the caches (see `stream_kernels`).

A job (see `thread_kernels`) is HEAD numbers: a ticket counter, B, T, D, the number of pieces, of how many rows each is
a multiple, whether to mend, whether to run the backward, the address of a row per piece for the carry of streaming (0:
none) and its bytes; then three per tensor: the address of its first row in scan order (0: no such tensor), and the
bytes to the next sequence and to the next step.
"""

from functools import cache

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from fprnn_lightning.scan.rows import rows
from fprnn_lightning.scan.stream_kernels import LINE, finish_stores, scan_row
from fprnn_lightning.scan.thread_kernels import ZEROS, compile_worker, place, row, run, take_ticket, version

MANY = 8  # pieces per core, if there are sequences enough
SMALLEST_PIECE = 32768  # elements, as for torch; below, waking a second core costs more than it saves
LARGEST_CACHED = 2**22  # bytes of a result; larger ones are streamed

HEAD = 10
NOTHING = (0, 0, 0)


@njit
def _multiply_add(out, a, b, c, channels, downwards, zero):
    """out = a b + c, rows given by addresses; up or down, as hardware prefetches only a stream of one direction."""
    out, a, b, c = row(out, channels, zero), row(a, channels, zero), row(b, channels, zero), row(c, channels, zero)
    if downwards:
        for d in range(channels - 1, -1, -1):
            out[d] = a[d] * b[d] + c[d]
    else:
        for d in range(channels):
            out[d] = a[d] * b[d] + c[d]


@njit
def _multiply_add_on(out, a, c, rows, channels, zero):
    """Row by row out = a out' + c, with out' the row before; from that row's address, for tensors without gaps.

    One offset for all three lets the compiler see once that they do not overlap, not once a row.
    """
    out, a, c = row(out, 1, zero), row(a, 1, zero), row(c, 1, zero)
    channels = np.uintp(channels)  # unsigned indices are not checked for being negative
    before, here = np.uintp(0), channels
    for _ in range(rows):
        for d in range(channels):
            out[here + d] = a[here + d] * out[before + d] + c[here + d]
        before, here = here, here + channels


@njit
def _multiply(out, a, b, channels, downwards, zero):
    """out = a b."""
    out, a, b = row(out, channels, zero), row(a, channels, zero), row(b, channels, zero)
    if downwards:
        for d in range(channels - 1, -1, -1):
            out[d] = a[d] * b[d]
    else:
        for d in range(channels):
            out[d] = a[d] * b[d]


@njit
def _copy(out, a, channels, zero):
    """out = a."""
    row(out, channels, zero)[:] = row(a, channels, zero)


@njit
def _changes(out, a, b, c, channels, zero):
    """The same as _multiply_add, and in how many channels it was not so already."""
    out, a, b, c = row(out, channels, zero), row(a, channels, zero), row(b, channels, zero), row(c, channels, zero)
    count = 0
    for d in range(channels):
        value = a[d] * b[d] + c[d]
        count += value != out[d]
        out[d] = value
    return count


@njit
def _tensor(job, i):
    return job[HEAD + 3 * i : HEAD + 3 * i + 3]


@njit
def _forward_rows(job, zero, b, start, end, mend, carry):
    T, D, size = job[2], job[3], job[9]
    decay, drive, initial, states = _tensor(job, 0), _tensor(job, 1), _tensor(job, 2), _tensor(job, 3)
    a, x, y, y_step = place(decay, b, start), place(drive, b, start), place(states, b, start), states[2]
    if not mend:
        if start == 0 and initial[0] != 0:
            _multiply_add(y, a, place(initial, b, 0), x, D, y_step < 0, zero)
        else:
            _copy(y, x, D, zero)
        if carry != 0:
            _copy(carry, y, D, zero)
        start += 1
        a, x, y = a + decay[2], x + drive[2], y + y_step
        if carry == 0 and decay[2] == drive[2] == y_step > 0:
            _multiply_add_on(y - y_step, a - y_step, x - y_step, end - start, D, zero)
            return T
    for t in range(start, end):
        if mend:
            if _changes(y, a, y - y_step, x, D, zero) == 0:
                return t
        elif carry != 0:
            scan_row(y, a, x, carry, 0, 0, size, y_step < 0, zero)
        else:
            _multiply_add(y, a, y - y_step, x, D, y_step < 0, zero)
        a, x, y = a + decay[2], x + drive[2], y + y_step
    return T


@njit
def _backward_rows(job, zero, b, start, end, mend, carry):
    T, D, size = job[2], job[3], job[9]
    decay, grad, initial, states = _tensor(job, 0), _tensor(job, 1), _tensor(job, 2), _tensor(job, 3)
    grad_decay, grad_drive = _tensor(job, 4), _tensor(job, 5)
    z_step, downwards = grad_drive[2], grad_drive[2] < 0
    a, g, z = place(decay, b, start - 1), place(grad, b, start), place(grad_drive, b, start)
    h, w = place(states, b, start + 1), place(grad_decay, b, start)
    for t in range(start, end):
        previous = h if t + 1 < T else place(initial, b, 0)
        if carry != 0 and t > start and (w == 0 or previous != 0):
            scan_row(z, a, g, carry, w, previous, size, downwards, zero)
        else:
            if mend:
                if _changes(z, a, z - z_step, g, D, zero) == 0:
                    return t
            elif t > start:
                _multiply_add(z, a, z - z_step, g, D, downwards, zero)
            else:
                _copy(z, g, D, zero)
                if carry != 0:
                    _copy(carry, z, D, zero)
            if previous == 0 and w != 0:
                row(w, D, zero)[:] = zero
            elif w != 0:
                _multiply(w, z, previous, D, downwards, zero)
        a, g, z, h, w = a + decay[2], g + grad[2], z + z_step, h + states[2], w + grad_decay[2]
    return T


@njit
def _run_rows(job, zero, b, start, end, mend, carry):
    if job[7]:
        return _backward_rows(job, zero, b, start, end, mend, carry)
    return _forward_rows(job, zero, b, start, end, mend, carry)


@njit
def _work(counter, zero):
    job = carray(counter, (HEAD + 3 * 6,))
    B, T, pieces, unit, mend = job[1], job[2], job[4], job[5], job[6]
    units = B * T // unit
    piece = take_ticket(counter)
    while piece < pieces:
        first, last = units * piece // pieces * unit, units * (piece + 1) // pieces * unit
        start = first // T * T  # of the sequence in which the piece begins
        if not mend:
            carry = job[8] + piece * job[9] if job[8] != 0 else 0
            for begin in range(start, last, T):
                _run_rows(job, zero, begin // T, max(first - begin, 0), min(last - begin, T), False, carry)
            finish_stores()
        elif first > start >= B * T * (piece - 1) // pieces:  # the sequence's first cut: mend all of it from here
            t = first - start
            while t < T:
                t = _run_rows(job, zero, start // T, t, T, True, 0)
                next_cut = ((start + t + 1) * pieces + B * T - 1) // (B * T)
                t = min(B * T * next_cut // pieces - start, T)
        piece = take_ticket(counter)


def _make_worker(zero, version):
    def work(counter):
        if version:
            _work(counter, zero)

    return work


@cache
def _worker(dtype: torch.dtype):
    return compile_worker(_make_worker(ZEROS[dtype], version()))


def _run(x: Tensor, backward: bool, *layouts: int) -> None:
    """Runs one job on as many cores as torch uses; x is the (B, T, D) tensor of results, contiguous."""
    B, T, D = x.shape
    threads = max(1, min(torch.get_num_threads(), B * T * D // SMALLEST_PIECE))
    cut = B % threads and B // threads < MANY
    pieces, unit = (threads, 1) if cut else (min(B, MANY * threads), T)
    worker, size = _worker(x.dtype), D * x.element_size()
    streamed = x.nbytes > LARGEST_CACHED and size % LINE == 0
    carries = x.new_empty(pieces, D) if streamed else None
    head = B, T, D, pieces, unit
    run(worker, (0, *head, False, backward, carries.data_ptr() if streamed else 0, size, *layouts), threads)
    if cut:
        run(worker, (0, *head, True, backward, 0, size, *layouts), min(threads, B))


def _layout(x: Tensor, backwards: bool) -> tuple[int, int, int]:
    """Address of the first row of (B, T, D) in scan order, and the bytes to the next sequence and to the next step."""
    size, (batch, time, _) = x.element_size(), x.stride()
    if backwards:
        return x.data_ptr() + (x.shape[1] - 1) * time * size, batch * size, -time * size
    return x.data_ptr(), batch * size, time * size


def forward(decay: Tensor, drive: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """All states (B, T, ...) of the scan, contiguous; see linear_reference.forward."""
    states = torch.empty_like(drive, memory_format=torch.contiguous_format)
    decay, drive, out = rows(decay), rows(drive), rows(states)
    start = None if initial is None else rows(initial.unsqueeze(1))  # a variable keeps its memory until the end
    _run(
        out,
        False,
        *_layout(decay, reverse),
        *_layout(drive, reverse),
        *(NOTHING if start is None else _layout(start, False)),
        *_layout(out, reverse),
        *NOTHING,
        *NOTHING,
    )
    return states


def backward(
    grad: Tensor,
    decay: Tensor,
    initial: Tensor | None,
    states: Tensor,
    reverse: bool,
    needed: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients to decay, drive and initial where needed; see linear_reference.backward."""
    grad_drive = torch.empty_like(grad, memory_format=torch.contiguous_format)
    grad_decay = torch.empty_like(grad_drive) if needed[0] else None
    decay, grad, states, adjoint, backwards = rows(decay), rows(grad), rows(states), rows(grad_drive), not reverse
    start = None if initial is None else rows(initial.unsqueeze(1))  # a variable keeps its memory until the end
    _run(
        adjoint,
        True,
        *_layout(decay, backwards),
        *_layout(grad, backwards),
        *(NOTHING if start is None else _layout(start, False)),
        *_layout(states, backwards),
        *(_layout(rows(grad_decay), backwards) if needed[0] else NOTHING),
        *_layout(adjoint, backwards),
    )
    grad_initial = None
    if needed[2]:
        first = -1 if reverse else 0
        grad_initial = (decay[:, first] * adjoint[:, first]).view(initial.shape)
    return grad_decay, grad_drive if needed[1] else None, grad_initial
