"""Compiles Triton kernels to machine code, without a GPU, and prints what each needs of it, as JSON.

    python compile_kernels.py compiled_linear

A file compiled_*.py beside this one has a function `cases`, which yields the kernels to compile; see `Case`. It is a
script because tests run in Triton's interpreter, in which nothing can be compiled.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
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
    """

    name: str
    kernel: JITFunction
    arguments: dict[str, object]
    num_warps: int


def compile_case(case: Case, target: GPUTarget) -> triton.compiler.CompiledKernel:
    """The compiled kernel, with all its intermediate texts."""
    given = [(name, case.arguments[name]) for name in case.kernel.arg_names]
    signature = {name: value.partition(":")[0] if isinstance(value, str) else "constexpr" for name, value in given}
    constants = {name: value for name, value in given if not isinstance(value, str)}
    aligned = [(i,) for i, (_, value) in enumerate(given) if isinstance(value, str) and value.endswith(":16")]
    source = ASTSource(case.kernel, signature, constants, {key: [["tt.divisibility", 16]] for key in aligned})
    return triton.compile(source, target=target, options={"num_warps": case.num_warps})


def resources(compiled: triton.compiler.CompiledKernel) -> dict[str, int]:
    """Registers per thread, and how many bytes (NVIDIA: stack and spills) or registers (AMD) did not fit in them."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, *spilled = (
            int(re.search(rf"\.{field}:\s*(\d+)", text)[1])
            for field in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        )
        return {"registers": registers, "spilled": sum(spilled)}
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (int(re.search(rf"\b{field}:(\d+)", text)[1]) for field in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": stack + local}


def _measure(module: str, index: int, architecture: str) -> dict[str, object]:
    case = list(importlib.import_module(module).cases())[index]
    compiled = compile_case(case, TARGETS[architecture])
    return {"architecture": architecture, "name": case.name, **resources(compiled)}


def main(module: str) -> None:
    count = len(list(importlib.import_module(module).cases()))
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(os.cpu_count()) as pool:
        os.environ["TRITON_CACHE_DIR"] = folder
        jobs = [pool.submit(_measure, module, index, target) for target in TARGETS for index in range(count)]
        print(json.dumps([job.result() for job in jobs]))


if __name__ == "__main__":
    main(sys.argv[1])
