"""Every Triton kernel, in every configuration, compiles to machine code for the GPUs of two makers without a spill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = sorted(HERE.parent.glob("*/compiled_*.py"))
OTHERS = (pytest.param(name, marks=pytest.mark.slow) for name in ("sm_80", "sm_100", "gfx942"))


@pytest.mark.parametrize("architecture", ["sm_90", *OTHERS])
@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_kernels_fit_into_registers(file: Path, architecture: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(file.parent), *sys.path]))
    command = [sys.executable, HERE / "compile_kernels.py", file.stem, architecture]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    kernels = json.loads(result.stdout)
    assert kernels
    assert all(kernel["registers"] > 0 for kernel in kernels)
    assert [f"{kernel['name']}: {kernel['spilled']}" for kernel in kernels if kernel["spilled"]] == []
