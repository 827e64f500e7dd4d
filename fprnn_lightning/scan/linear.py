"""The linear scan h_t = decay_t h_{t-1} + drive_t: its checks, its choice of backend and its one autograd function."""

import importlib.util
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from fprnn_lightning.scan import reference

Backend = Literal["auto", "reference", "cpu"]


def linear_scan(
    decay: Tensor, drive: Tensor, initial: Tensor | None = None, *, reverse: bool = False, backend: Backend = "auto"
) -> Tensor:
    """Runs h_t = decay_t h_{t-1} + drive_t over time, elementwise in everything else, and returns every state.

    Half-precision inputs are scanned in float32 and the states rounded back. Differentiable any number of times.

    Args:
        decay: (B, T, ...) factors on the previous state, T ≥ 1; any strides.
        drive: (B, T, ...) what each step adds, same shape.
        initial: (B, ...) the state before the first step; zero if not given.
        reverse: Run from the last step to the first: h_t = decay_t h_{t+1} + drive_t, initial being the state after T.
        backend: "reference" (a loop over time, any device and dtype), "cpu" (numba, at memory bandwidth), or "auto":
            the fastest that can run.

    Returns:
        (B, T, ...) the states, in the common dtype of the inputs.

    Raises:
        ValueError: If shapes or devices do not match, or the backend is unknown or cannot run on these tensors.
    """
    if decay.shape != drive.shape or drive.dim() < 2 or drive.shape[1] == 0:
        raise ValueError(
            f"linear_scan needs decay and drive of one shape (B, T, ...) with T ≥ 1,"
            f" got {tuple(decay.shape)} and {tuple(drive.shape)}."
        )
    if decay.device != drive.device or (initial is not None and initial.device != drive.device):
        raise ValueError("linear_scan needs decay, drive and initial on one device.")
    dtype = torch.promote_types(decay.dtype, drive.dtype)
    if initial is not None:
        if initial.shape != drive[:, 0].shape:
            raise ValueError(
                f"linear_scan needs an initial state of shape {tuple(drive[:, 0].shape)}, the drive's without time,"
                f" got {tuple(initial.shape)}."
            )
        dtype = torch.promote_types(dtype, initial.dtype)
        initial = _cast(initial, carry_dtype(dtype))
    decay, drive = _cast(decay, carry_dtype(dtype)), _cast(drive, carry_dtype(dtype))
    module = _module(resolve_backend(drive, backend))
    scan = _LinearScan.apply if torch.is_grad_enabled() else _without_graph  # recording costs as much as a short scan
    return _cast(scan(decay, drive, initial, reverse, module), dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


def _without_graph(decay: Tensor, drive: Tensor, initial: Tensor | None, reverse: bool, module: ModuleType) -> Tensor:
    return module.forward(decay, drive, initial, reverse)


def carry_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the state is carried: float32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def resolve_backend(tensor: Tensor, backend: Backend = "auto") -> Literal["reference", "cpu"]:
    """Names the backend that scans tensors like this one; raises ValueError where the one asked for cannot."""
    runs_on_cpu = tensor.device.type == "cpu" and carry_dtype(tensor.dtype) in (torch.float32, torch.float64)
    match backend:
        case "auto":
            return "cpu" if runs_on_cpu and _has_numba() else "reference"
        case "cpu" if not runs_on_cpu:
            found = f"{tensor.dtype} on {tensor.device}"
            raise ValueError(f"Scan backend 'cpu' needs real floating-point tensors on the CPU, got {found}.")
        case "cpu" if not _has_numba():
            raise ValueError("Scan backend 'cpu' needs numba, which is not installed: pip install numba.")
        case "cpu" | "reference":
            return backend
        case _:
            raise ValueError(f"Unknown scan backend {backend!r}: choose auto, reference or cpu.")


@cache
def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@cache
def _module(backend: Literal["reference", "cpu"]) -> ModuleType:
    return reference if backend == "reference" else importlib.import_module("fprnn_lightning.scan.cpu_kernels")


class _LinearScan(torch.autograd.Function):
    """Every backend's gradient: its own fused backward, or differentiable scans for a second derivative."""

    @staticmethod
    def forward(ctx, decay, drive, initial, reverse, module):
        states = module.forward(decay, drive, initial, reverse)
        ctx.save_for_backward(decay, initial, states)
        ctx.reverse, ctx.module = reverse, module
        return states

    @staticmethod
    def backward(ctx, grad):
        decay, initial, states = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            gradients = reference.backward(
                grad, decay, initial, states, ctx.reverse, needed, lambda *scan: _LinearScan.apply(*scan, ctx.module)
            )
        else:
            gradients = ctx.module.backward(grad, decay, initial, states, ctx.reverse, needed)
        return *gradients, None, None
