"""The linear scan h_t = decay_t h_{t-1} + drive_t: its checks and its one autograd function over all backends."""

import torch
from torch import Tensor

from fprnn_lightning.scan import linear_reference
from fprnn_lightning.scan.backends import Backend, carry_dtype, implementation, is_traced, resolve_backend
from fprnn_lightning.scan.context_parallel import slices_in_use
from fprnn_lightning.scan.linear_slices import LinearScanOfSlices


def linear_scan(
    decay: Tensor, drive: Tensor, initial: Tensor | None = None, *, reverse: bool = False, backend: Backend = "auto"
) -> Tensor:
    """Runs h_t = decay_t h_{t-1} + drive_t over time, elementwise in everything else, and returns every state.

    Half-precision inputs are scanned in float32 and the states rounded back. Differentiable any number of times.
    Within `context_parallel`, T is this rank's slice of a longer time, and differentiable is once.

    Args:
        decay: (B, T, ...) factors on the previous state, T ≥ 1; any strides.
        drive: (B, T, ...) what each step adds, same shape.
        initial: (B, ...) the state before the first step; zero if not given.
        reverse: Run from the last step to the first: h_t = decay_t h_{t+1} + drive_t, initial being the state after T.
        backend: "reference" (a loop over time, on any device, complex numbers too), "cpu" (numba, at memory bandwidth),
            "triton" (a GPU), or "auto": the fastest that can run.

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
        places = [str(x.device) for x in (decay, drive, initial) if x is not None]
        raise ValueError(f"linear_scan needs decay, drive and initial on one device, got {', '.join(places)}.")
    dtype = torch.promote_types(decay.dtype, drive.dtype)
    if initial is not None:
        if initial.shape != drive[:, 0].shape:
            raise ValueError(
                f"linear_scan needs an initial state of shape {tuple(drive[:, 0].shape)}, the drive's without time,"
                f" got {tuple(initial.shape)}."
            )
        dtype = torch.promote_types(dtype, initial.dtype)
    drive = _cast(drive, dtype)
    backend = resolve_backend(drive, backend)
    slices = slices_in_use()
    # Triton widens numbers as it reads them, but what is handed from slice to slice is to be wide
    carry = dtype if backend == "triton" and slices is None else carry_dtype(dtype)
    initial = None if initial is None else _cast(initial, carry)
    if slices is not None:
        scanned = LinearScanOfSlices.apply(_cast(decay, carry), _cast(drive, carry), initial, reverse, backend, slices)
        return _cast(scanned, dtype)
    # recording a graph costs as much as a short scan
    scan = _LinearScan.apply if torch.is_grad_enabled() else _forward
    return _cast(scan(_cast(decay, carry), _cast(drive, carry), initial, reverse, backend), dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x if x.dtype is dtype else x.to(dtype)).resolve_neg()


class _LinearScan(torch.autograd.Function):
    """Every backend's gradient: its own fused backward, or differentiable scans for a second derivative."""

    @staticmethod
    def forward(ctx, decay, drive, initial, reverse, backend):
        states = _forward(decay, drive, initial, reverse, backend)
        ctx.save_for_backward(decay, initial, states)
        ctx.reverse, ctx.backend = reverse, backend
        return states

    @staticmethod
    def backward(ctx, grad):
        decay, initial, states = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            gradients = linear_reference.backward(
                grad, decay, initial, states, ctx.reverse, needed, lambda *scan: _LinearScan.apply(*scan, ctx.backend)
            )
        else:
            gradients = _backward(grad.resolve_neg(), decay, initial, states, ctx.reverse, needed, ctx.backend)
        return *gradients, None, None


def _forward(decay: Tensor, drive: Tensor, initial: Tensor | None, reverse: bool, backend: str) -> Tensor:
    if is_traced(drive):
        return _forward_op(decay, drive, initial, reverse, backend)
    return implementation("linear", backend).forward(decay, drive, initial, reverse)


def _backward(grad, decay, initial, states, reverse, needed, backend) -> tuple[Tensor | None, ...]:
    if is_traced(grad):
        gradients = _backward_op(grad, decay, initial, states, reverse, needed, backend)
        return tuple(gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True))
    return implementation("linear", backend).backward(grad, decay, initial, states, reverse, needed)


@torch.library.custom_op("fprnn_lightning::linear_scan", mutates_args=())
def _forward_op(decay: Tensor, drive: Tensor, initial: Tensor | None, reverse: bool, backend: str) -> Tensor:
    return implementation("linear", backend).forward(decay, drive, initial, reverse)


@_forward_op.register_fake
def _(decay, drive, initial, reverse, backend):
    return torch.empty_like(drive, memory_format=torch.contiguous_format)


@torch.library.custom_op("fprnn_lightning::linear_scan_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    decay: Tensor,
    initial: Tensor | None,
    states: Tensor,
    reverse: bool,
    needed: list[bool],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = implementation("linear", backend).backward(grad, decay, initial, states, reverse, needed)
    return tuple(grad.new_empty(0) if gradient is None else gradient.contiguous() for gradient in gradients)


@_backward_op.register_fake
def _(grad, decay, initial, states, reverse, needed, backend):
    shapes = grad.shape, grad.shape, grad[:, 0].shape
    return tuple(grad.new_empty(shape if wanted else 0) for shape, wanted in zip(shapes, needed, strict=True))
