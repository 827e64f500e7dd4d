"""numba functions on the threads that torch itself computes with.

A second pool of threads, numba's own, contends with torch's for the cores. So a worker is compiled to a C function of
one argument, a *job*, and called once on each of torch's OpenMP threads through libgomp's entry point GOMP_parallel, as
a compiler would. torch.set_num_threads holds here too. A forked process has lost torch's pool and would wait for it
forever, so torch is held to one thread there, as DataLoader does with its workers. Where there is no such entry point
one core does all.

A job is an array of int64 whose first element is a ticket counter, from which threads take pieces of work; addresses of
tensors are among the rest. Workers are compiled on first use and cached on disk. numba would notice a change of the
worker's own file only, not of what that imports, so workers are made as closures over `version`, which numba looks at.
"""

import ctypes
import hashlib
import os
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numba
import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic

ZEROS = {torch.float32: np.float32(0), torch.float64: np.float64(0)}  # by which kernels know what they compute with


@intrinsic
def pointer(typingctx, address, zero):
    """An address as a pointer to numbers of the type of zero."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(zero)(types.int64, zero), generate


@intrinsic
def take_ticket(typingctx, job):
    """Reads and increments the counter that a job begins with."""

    def generate(context, builder, signature, arguments):
        return builder.atomic_rmw("add", arguments[0], context.get_constant(types.int64, 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), generate


@njit
def place(layout, b, t):
    """The address of the row (b, t) of a tensor: a layout is its address and the bytes to the next b and the next t."""
    return layout[0] + b * layout[1] + t * layout[2]


@njit
def row(address, channels, zero):
    """So many numbers from an address on."""
    return carray(pointer(address, zero), (channels,))


@cache
def version(*constants: float) -> int:
    """A number that changes with the sources of kernels, and with constants that these take from other files."""
    sources = sorted(Path(__file__).parents[1].glob("*/*_kernels.py"))
    text = b"".join(map(Path.read_bytes, sources)) + repr(constants).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7])


def compile_worker(work: Callable) -> Callable:
    """Compiles a function of a pointer to a job."""
    signature = types.void(types.CPointer(types.int64))
    try:
        return numba.cfunc(signature, cache=True)(work)
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return numba.cfunc(signature)(work)


def run(worker: Callable, job: Sequence[int], threads: int) -> None:
    """Calls a compiled worker with the job (ticket counter first, 0) once on each of so many threads, and waits."""
    memory = array("q", job)
    _parallel()(worker.address, memory.buffer_info()[0], threads, 0)


@cache
def _parallel():
    """GOMP_parallel(function, argument, threads, flags)."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, TypeError):  # an OpenMP of another kind, or Windows
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        return lambda function, argument, threads, flags: call(function)(argument)
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
