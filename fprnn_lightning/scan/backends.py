"""Which code runs a scan: the definition, numba on the CPU, or Triton on a GPU. Nothing is imported before it runs."""

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

Backend = Literal["auto", "reference", "cpu", "triton"]
Resolved = Literal["reference", "cpu", "triton"]

INSTALLED = {package: importlib.util.find_spec(package) is not None for package in ("numba", "triton")}


def carry_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the state is carried: float32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def resolve_backend(tensor: Tensor, backend: Backend = "auto") -> Resolved:
    """Names the backend that scans tensors like this one.

    "auto" is Triton on a GPU, numba on the CPU, and the loop over time of the reference where these are not installed,
    for complex numbers and on any other device.

    Raises:
        ValueError: If the backend asked for cannot run, saying why.
    """
    match backend:
        case "auto":
            fast, reason = ("triton", _why_not_triton(tensor)) if tensor.is_cuda else ("cpu", _why_not_cpu(tensor))
            return "reference" if reason else fast
        case "cpu":
            reason = _why_not_cpu(tensor)
        case "triton":
            reason = _why_not_triton(tensor)
        case "reference":
            reason = None
        case _:
            raise ValueError(f"Unknown scan backend {backend!r}: choose auto, reference, cpu or triton.")
    if reason:
        raise ValueError(f"Scan backend {backend!r} needs {reason}.")
    return backend


def is_traced(tensor: Tensor) -> bool:
    """Whether a scan must be one node of a graph (or of what a tensor's class makes of it), with no memory to read yet.

    In all other cases going through torch's dispatcher would only cost time.
    """
    return (
        torch.compiler.is_compiling()
        or type(tensor) not in (Tensor, Parameter)
        or torch.jit.is_tracing()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def _is_real(tensor: Tensor) -> bool:
    return carry_dtype(tensor.dtype) in (torch.float32, torch.float64)


def _why_not_cpu(tensor: Tensor) -> str | None:
    if not tensor.is_cpu or not _is_real(tensor):
        return f"real floating-point tensors on the CPU, got {tensor.dtype} on {tensor.device}"
    return None if INSTALLED["numba"] else "numba, which is not installed: pip install numba"


def _why_not_triton(tensor: Tensor) -> str | None:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (tensor.is_cuda or (interpreted and tensor.is_cpu)) or not _is_real(tensor):
        hint = "" if interpreted else ", or TRITON_INTERPRET=1 in the environment to try it on the CPU"
        return f"real floating-point tensors on a GPU, got {tensor.dtype} on {tensor.device}{hint}"
    return None if INSTALLED["triton"] else "triton, which is not installed: pip install triton"


@cache
def implementation(scan: Literal["linear", "selective"], backend: Resolved) -> ModuleType:
    """The module that has this scan's `forward` and `backward` in this backend."""
    return importlib.import_module(f"fprnn_lightning.scan.{scan}_{_FILES[backend]}")


_FILES = {"reference": "reference", "cpu": "cpu_kernels", "triton": "triton_kernels"}
