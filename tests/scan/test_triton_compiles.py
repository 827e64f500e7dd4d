"""Every Triton kernel, in every configuration, compiles to machine code for the GPUs of two makers without a spill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = sorted(HERE.parent.glob("*/compiled_*.py"))
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.fixture(scope="module", params=KERNELS, ids=lambda file: file.stem)
def compiled(request) -> list[dict]:
    """What compile_kernels.py reports: for each architecture and kernel the registers, and what did not fit in them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(request.param.parent), *sys.path]))
    command = [sys.executable, HERE / "compile_kernels.py", request.param.stem]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_fit_into_registers(compiled, architecture):
    kernels = [kernel for kernel in compiled if kernel["architecture"] == architecture]
    assert kernels
    assert all(kernel["registers"] > 0 for kernel in kernels)
    assert [f"{kernel['name']}: {kernel['spilled']}" for kernel in kernels if kernel["spilled"]] == []
