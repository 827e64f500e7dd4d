"""Compiles Triton kernels to machine code, without a GPU, and prints what each needs of it, as JSON.

    python compile_kernels.py compiled_linear sm_90

A file compiled_*.py, in a folder of PYTHONPATH, has a function `cases`, which yields the kernels to compile for a GPU
with so many threads in a warp; see `Case`. This is a script because tests run in Triton's interpreter, in which nothing
compiles.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Case:
    """One kernel as it would be compiled for one call.

    Attributes:
        name: What tells it from the others.
        kernel: The jitted function.
        arguments: By name, in any order. A type as Triton writes it ("*bf16", "i32"), with ":16" behind it where the
            value is divisible by 16; or the value, where Triton knows it: constexpr, None, and integers that are 1.
        num_warps: Of a program.
        options: More of Triton's, for NVIDIA alone.
    """

    name: str
    kernel: JITFunction
    arguments: dict[str, object]
    num_warps: int
    options: dict[str, int] = field(default_factory=dict)


def compile_case(case: Case, target: GPUTarget) -> triton.compiler.CompiledKernel:
    """The compiled kernel, with all its intermediate texts."""
    given = [(name, case.arguments[name]) for name in case.kernel.arg_names]
    signature = {name: value.partition(":")[0] if isinstance(value, str) else "constexpr" for name, value in given}
    constants = {name: value for name, value in given if not isinstance(value, str)}
    aligned = [(i,) for i, (_, value) in enumerate(given) if isinstance(value, str) and value.endswith(":16")]
    source = ASTSource(case.kernel, signature, constants, {key: [["tt.divisibility", 16]] for key in aligned})
    options = case.options if target.backend == "cuda" else {}
    return triton.compile(source, target=target, options={"num_warps": case.num_warps} | options)


def resources(compiled: triton.compiler.CompiledKernel) -> dict[str, int]:
    """Registers per thread, and the bytes of memory that each thread needs for what does not fit into them.

    On AMD, scalar registers that do not fit are kept in lanes of vector registers, which is no memory.
    """
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        fields = ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size")
        assert "irr.guard" not in text, f"{compiled.name}: a loop is split between threads, barriers in it torn apart"
        registers, spilled, private = (int(re.search(rf"\.{name}:\s*(\d+)", text)[1]) for name in fields)
        return {"registers": registers, "spilled": 4 * spilled + private}
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": stack + local}


def _measure(module: str, index: int, architecture: str) -> dict[str, object]:
    target = TARGETS[architecture]
    case = list(importlib.import_module(module).cases(target.warp_size))[index]
    compiled = compile_case(case, target)
    return {"name": case.name, **resources(compiled)}


def main(module: str, architecture: str) -> None:
    count = len(list(importlib.import_module(module).cases(32)))
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(os.cpu_count()) as pool:
        os.environ["TRITON_CACHE_DIR"] = folder
        jobs = [pool.submit(_measure, module, index, architecture) for index in range(count)]
        print(json.dumps([job.result() for job in jobs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
