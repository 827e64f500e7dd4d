"""The selective scan's Triton kernels as `compile_kernels` compiles them: for the numbers of states that models have,
both forms, and sequences whole or cut into segments.
"""

import itertools
from collections.abc import Iterator

from compile_kernels import Case

from fprnn_lightning.scan.selective_triton_kernels import (
    CHUNK,
    MOST_REGISTERS,
    gradient_kernel,
    gradient_sizes,
    sweep_kernel,
    sweep_sizes,
)

CARRIED = ["A", "D", "initial", "boundaries", "last", "adjoints", "grad_B", "grad_C", "sums"]
INPUTS = ["x", "values", "dt", "weights", "readout", "grad_y", "y", "B_and_C", "grad_x", "grad_dt"]
OUTER_STRIDES = [f"{name}_{axis}" for name in ["values", "dt", "weights", "readout", "x", "grad"] for axis in "bt"]
INNER_STRIDES = ["values_d", "dt_h", "weights_n", "readout_n", "x_d", "grad_d", "initial_n", "D_d"]
READOUT = ["readout", "D", "y", "readout_b", "readout_t", "readout_n", "D_d"]


def cases(warp: int) -> Iterator[Case]:
    forms = (16, False), (64, False), (64, True), (128, True)
    for (N, alike), kind in itertools.product(forms, ("forward", "backward", "gradients")):
        general = (
            dict.fromkeys(CARRIED, "*fp32:16")
            | dict.fromkeys(INPUTS, "*bf16:16")
            | dict.fromkeys([*OUTER_STRIDES, "A_h", "initial_b", "initial_d"], "i32:16")
            | dict.fromkeys(INNER_STRIDES, 1)
            | dict.fromkeys(["batch", "T", "channels", "chunks", "span", "spans", "blocks"], "i32")
            | {"A_n": None if alike else 1, "P": "i32:16" if alike else 1, "N": N, "CHUNK": CHUNK}
        )
        name = f"{kind} N={N}" + " alike" * alike
        if kind == "gradients":
            yield Case(name, gradient_kernel, general | gradient_sizes(N, warp), 1, MOST_REGISTERS)
            continue
        absent = dict.fromkeys(READOUT) if kind == "backward" else {}
        general |= absent | sweep_sizes(N, warp) | {"REVERSE": kind == "backward"}
        yield Case(name, sweep_kernel, general | {"slots": None, "counter": None}, 1)
        yield Case(name + " segments", sweep_kernel, general | {"slots": "*i32:16", "counter": "*i32"}, 1)
