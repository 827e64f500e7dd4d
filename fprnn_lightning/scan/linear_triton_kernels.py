"""The linear scan h_t = decay_t h_{t-1} + drive_t on a GPU: one Triton kernel, which reads and writes each number once.

A tile of BLOCK_T steps and BLOCK_D channels is held in registers, as INNER x OUTER x BLOCK_D: a thread has INNER steps
in a row and scans them alone; then the ends of the OUTER runs of steps are scanned across threads. With channels enough
to fill the GPU, programs of one warp walk through all tiles of their channels; otherwise programs and tiles are larger,
and where there are many tiles each has a program of its own, which hands over the state to that of the next tile (see
`lookback_kernels`).

Backward is the same walk from the last step to the first, over decays shifted by one:

    λ_t = grad_t + decay_{t+1} λ_{t+1},  grad_drive_t = λ_t,  grad_decay_t = λ_t h_{t-1},  grad_initial = decay_1 λ_1

A walk against time is one with negative strides from the last step on. Steps after the end have decay 1 and drive 0, so
that the state passes through them. Within a tile decays are multiplied with each other: where the product of up to 256
overflows, that is from a mean size of 1.4 on, the result is NaN, even if a loop's, its states being zero, were not.
Configurations are chosen by a rule instead of by timing them, as they round differently: a run that is repeated or
resumed on a GPU of the same kind must give the same numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fprnn_lightning.scan.lookback_kernels import hand_over, new_workspace, processors, receive, take_ticket
from fprnn_lightning.scan.rows import rows

CONFIGS = {  # by whether backward, whether there are few channels, and the bytes of a number
    (backward, few, size): triton.Config(
        {"INNER": steps * min(size, 4), "OUTER": outer, "BLOCK_D": row_bytes // size}, num_warps=warps
    )
    for backward, few, steps, outer, row_bytes, warps in (
        (False, False, 2, 1, 512, 1),
        (True, False, 2, 1, 512, 1),
        (False, True, 2, 32, 128, 8),
        (True, True, 1, 32, 128, 8),
    )
    for size in (2, 4, 8)
}
PROGRAMS_PER_PROCESSOR = 8  # of one warp, to keep a GPU busy
SHORT = 256  # steps that one program walks through in any case


@triton.jit
def _compose(decay, state, later_decay, later_state):
    return decay * later_decay, later_decay * state + later_state


@triton.jit
def _last(x):
    """The last row along the first axis."""
    i = tl.arange(0, x.shape[0])
    for _ in tl.static_range(len(x.shape) - 1):
        i = tl.expand_dims(i, -1)
    return tl.sum(tl.where(i == x.shape[0] - 1, x, 0), 0)


@triton.jit(do_not_specialize=["B", "T"])
def scan_kernel(
    decay, drive, initial, states, out, product, first, workspace,
    decay_b, decay_t, drive_b, drive_t, out_t, B, T, D,
    BACKWARD: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scans drive (B, T, D) to out; backward, also λ times the states to product, and the gradient of initial to first.

    Rows of D channels are contiguous, and all of initial, first, states, out and product, but for the sign of out_t.
    Pointers are to the first step of the walk; any of the outputs may be None. A workspace, with a carry for each tile
    and channel, means that each tile has a program of its own.
    """
    BLOCK_T: tl.constexpr = INNER * OUTER
    carry_type: tl.constexpr = tl.float64 if decay.dtype.element_ty == tl.float64 else tl.float32
    tiles, blocks = tl.cdiv(T, BLOCK_T), tl.cdiv(D, BLOCK_D)
    if workspace is not None:
        width = tl.cast(B, tl.int64) * D
        ticket = take_ticket(workspace + tiles * width)
        program, first_tile = ticket % (B * blocks), ticket // (B * blocks)
        end_tile = first_tile + 1
    else:
        program, first_tile, end_tile = tl.program_id(0), 0, tiles
    b = (program // blocks).to(tl.int64)
    d = (program % blocks).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    real = d < D
    step = tl.arange(0, OUTER)[None, :, None] * INNER + tl.arange(0, INNER)[:, None, None]
    decay += b * decay_b + d
    drive += b * drive_b + d
    row = b * T * D + d
    channel = b * D + d

    before = tl.zeros([BLOCK_D], carry_type)
    if initial is not None:
        before = tl.load(initial + channel, mask=real, other=0).to(carry_type)
    carry = tl.zeros([BLOCK_D], carry_type) if BACKWARD else before

    for tile in range(first_tile, end_tile):
        t = tl.cast(tile, tl.int64) * BLOCK_T + step
        inside = (step < T - tile * BLOCK_T) & real
        # other=1.0: Triton's interpreter takes an integer for the bits of a bfloat16
        if BACKWARD:
            a = tl.load(decay + (t - 1) * decay_t, mask=inside & (t > 0), other=1.0).to(carry_type)
        else:
            a = tl.load(decay + t * decay_t, mask=inside, other=1.0).to(carry_type)
        x = tl.load(drive + t * drive_t, mask=inside, other=0).to(carry_type)
        if product is not None:
            h = tl.load(states + row + (t + 1) * out_t, mask=inside & (t + 1 < T), other=0)
        a, x = tl.associative_scan((a, x), 0, _compose)
        a_ends, x_ends = tl.associative_scan((_last(a), _last(x)), 0, _compose)
        a_end, x_end = _last(a_ends), _last(x_ends)  # before waiting, as others wait for what comes after
        if workspace is not None:
            slots = workspace + tile * width + channel
            if tile > 0:
                carry = receive(slots - width, real)
        state = a_end * carry + x_end
        if workspace is not None:
            hand_over(slots, state, real)
        outer = tl.arange(0, OUTER)[:, None]
        previous = tl.broadcast_to(tl.maximum(outer - 1, 0), (OUTER, BLOCK_D))
        start = tl.gather(a_ends, previous, 0) * carry + tl.gather(x_ends, previous, 0)
        y = a * tl.where(outer > 0, start, carry) + x
        carry = state

        if out is not None:
            tl.store(out + row + t * out_t, y, mask=inside)
        if product is not None:
            tl.store(product + row + t * out_t, y * tl.where(t + 1 < T, h.to(carry_type), before), mask=inside)

    if first is not None and end_tile == tiles:
        first_decay = tl.load(decay + tl.cast(T - 1, tl.int64) * decay_t, mask=real, other=0).to(carry_type)
        tl.store(first + channel, first_decay * carry, mask=real)


def _are_few(B: int, D: int, x: Tensor) -> bool:
    """Whether programs of one warp that walk through all steps of their channels would be too few for the GPU."""
    walks = B * triton.cdiv(D, CONFIGS[False, False, x.element_size()].kwargs["BLOCK_D"])
    return walks < PROGRAMS_PER_PROCESSOR * processors(x.device)


def _launch(backward: bool, against_time: bool, decay, drive, initial, states, out, product, first) -> None:
    """Runs the kernel on tensors (B, T, D); initial and first are (B, ...) and contiguous; None where not wanted."""
    B, T, D = drive.shape
    if B * D == 0:
        return
    few = _are_few(B, D, drive)
    split = few and T > SHORT
    config = CONFIGS[backward, few, drive.element_size()]
    INNER, OUTER, BLOCK_D = config.kwargs.values()
    tiles, blocks = triton.cdiv(T, INNER * OUTER), triton.cdiv(D, BLOCK_D)
    sign, begin = (-1, T - 1) if against_time else (1, 0)
    decay, drive, states, out, product = (
        None if x is None else x[:, begin:] for x in (decay, drive, states, out, product)
    )
    with torch.cuda.device_of(drive):
        scan_kernel[(B * blocks * (tiles if split else 1),)](
            decay, drive, initial, states, out, product, first, new_workspace(tiles * B * D, drive) if split else None,
            decay.stride(0), sign * decay.stride(1), drive.stride(0), sign * drive.stride(1), sign * D, B, T, D,
            BACKWARD=backward, **config.all_kwargs(),
        )  # fmt: skip


def forward(decay: Tensor, drive: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """All states (B, T, ...) of the scan, contiguous; see linear_reference.forward."""
    states = torch.empty_like(drive, memory_format=torch.contiguous_format)
    start = None if initial is None else initial.contiguous()
    _launch(False, reverse, rows(decay), rows(drive), start, None, rows(states), None, None)
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
    shapes = grad.shape, grad.shape, grad[:, 0].shape
    gradients = tuple(grad.new_empty(shape) if wanted else None for shape, wanted in zip(shapes, needed, strict=True))
    product, out = (None if x is None else rows(x) for x in gradients[:2])
    start = None if initial is None else initial.contiguous()
    states = rows(states.contiguous()) if needed[0] else None
    _launch(True, not reverse, rows(decay), rows(grad), start, states, out, product, gradients[2])
    return gradients
