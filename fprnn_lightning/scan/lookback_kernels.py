"""Handing carries from program to program within one launch, so that one long sequence can be scanned by many programs.

Each part of a sequence has *slots*, one per number of its carry, which are EMPTY until its program hands over the state
after that part; the program of the next part waits for them. Two rules make that right:

- No program waits for one that cannot run. Parts are dealt out by ticket, not by program id: whoever holds a ticket has
  started, and so all holders of earlier ones have, and started programs are never taken off the GPU. A part must have a
  later ticket than the part that it waits for.
- A number cannot be seen before it is there. It is its own flag: a slot is written once, by one atomic operation, and
  read by atomics alone, so a reader gets EMPTY or the whole number. As nothing is concluded from it about any other
  address, relaxed atomics, which pass by the L1 caches, are enough. (A flag beside the data would need a release and an
  acquire, and so twice the time for each handing over.)
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

EMPTY = tl.constexpr(-1)  # all bits set: a NaN, but not the one that is handed over for NaN


def new_workspace(carries: int, like: Tensor) -> Tensor:
    """So many empty slots and after them the ticket counter, for carries of float64 if `like` is, else of float32."""
    bits = torch.int64 if like.dtype == torch.float64 else torch.int32
    return torch.full((carries + 1,), EMPTY.value, dtype=bits, device=like.device)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU, which decide whether a sequence needs many programs; 1 for the interpreter's CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def take_ticket(counter):
    """0 for the first program that asks, then 1, 2, ..."""
    return tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") + 1


@triton.jit
def hand_over(slots, carry, mask):
    """Fills a tensor of slots with the carry, float32 into int32 slots and float64 into int64."""
    if slots.dtype.element_ty == tl.int32:
        bits = tl.where(carry == carry, carry, float("nan")).to(tl.int32, bitcast=True)
    else:
        bits = tl.where(carry == carry, carry, float("nan")).to(tl.int64, bitcast=True)
    tl.atomic_and(slots, bits, mask=mask, sem="relaxed", scope="gpu")  # EMPTY & bits = bits; AMD has no masked exchange


@triton.jit
def receive(slots, mask):
    """Waits for all slots of a tensor and returns the carry, 0 where the mask is off.

    Polls by an atomic that changes nothing: of threads that hold the same element one reads and tells the others, so
    that all leave the loop together. The loop has the only one, as LLVM would merge a first one outside with the loop's
    and so, for AMD, tear its barriers apart.
    """
    nothing = tl.zeros(slots.shape, slots.dtype.element_ty)
    bits, filled = nothing, 0
    while filled == 0:
        bits = tl.where(mask, tl.atomic_or(slots, nothing, mask=mask, sem="relaxed", scope="gpu"), 0)
        filled = tl.min((bits != EMPTY).to(tl.int32).reshape(bits.numel))
    if slots.dtype.element_ty == tl.int32:
        return bits.to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.float64, bitcast=True)
