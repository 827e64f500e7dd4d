"""Rows of results too large for the caches, written past them, a cache line at a time.

An ordinary store first reads the line that it is going to overwrite, a fourth of all that a scan moves. These do not;
but what they wrote is not at hand for the next step, which therefore finds the state in a row of its own, the carry.
"""

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LINE = 64  # bytes


def _vectors(context, builder, zero):
    """Functions that load one of the two vectors of the line at an address, and that store it."""
    real = context.get_value_type(zero)
    size = zero.bitwidth // 8
    vector = ir.VectorType(real, LINE // 2 // size)

    def pointer(address, half):
        place = builder.add(address, ir.IntType(64)(half * LINE // 2))
        return builder.inttoptr(place, vector.as_pointer())

    def load(address, half):
        value = builder.load(pointer(address, half))
        value.align = size
        return value

    def store(value, address, half, past_caches):
        instruction = builder.store(value, pointer(address, half))
        instruction.align = LINE // 2
        if past_caches:
            instruction.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))

    return load, store


@intrinsic
def _scan_line(typingctx, out, a, c, carry, zero):
    """carry = a carry + c, and out the same."""

    def generate(context, builder, signature, arguments):
        out, a, c, carry, _ = arguments
        load, store = _vectors(context, builder, zero)
        for half in range(2):
            state = builder.fadd(builder.fmul(load(a, half), load(carry, half)), load(c, half))
            store(state, carry, half, past_caches=False)
            store(state, out, half, past_caches=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, zero), generate


@intrinsic
def _multiply_line(typingctx, out, a, b, zero):
    """out = a b."""

    def generate(context, builder, signature, arguments):
        out, a, b, _ = arguments
        load, store = _vectors(context, builder, zero)
        for half in range(2):
            store(builder.fmul(load(a, half), load(b, half)), out, half, past_caches=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, zero), generate


@intrinsic
def finish_stores(typingctx):
    """Until all that was written past the caches is in memory."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit
def scan_row(out, a, c, carry, product, factor, size, downwards, zero):
    """carry = a carry + c, out the same, product = carry factor unless it is 0; all by address, of so many bytes."""
    for i in range(0, size, LINE):
        d = size - LINE - i if downwards else i
        _scan_line(out + d, a + d, c + d, carry + d, zero)
        if product != 0:
            _multiply_line(product + d, carry + d, factor + d, zero)
