"""The selective scan of Mamba and Mamba-2: its checks and its one autograd function over all backends.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_tᵀ        y_t = h_t C_t + D x_t

Both models are H heads of P channels with one dt per head: in Mamba a head is one channel, whose N states each have a
decay rate of their own; in Mamba-2 a head has many channels, and one decay rate. The states (B, T, D, N) are never
written to memory: forward keeps those before every CHUNK-th step, from which backward computes the others anew.
Within `context_parallel`, T is this rank's slice of a longer time, and the last state that after the slice.
"""

import torch
from torch import Tensor

from fprnn_lightning.scan import selective_reference
from fprnn_lightning.scan.backends import Backend, carry_dtype, implementation, is_traced, resolve_backend
from fprnn_lightning.scan.context_parallel import slices_in_use
from fprnn_lightning.scan.selective_slices import SelectiveScanOfSlices

CHUNK = 32  # time steps between two states that are kept for backward


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Mamba's scan: each channel drives N states that decay at rates of their own, and reads their sum.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,  y_t = C_t · h_t + D x_t.  Source: Mamba (arXiv 2312.00752), eq. 2.

    The state is carried in float32 (float64 for such inputs). Forward keeps N / 32 numbers in float32 for each of x,
    backward takes about as much again; half-precision tensors are, on the CPU, copied to float32 besides.

    Args:
        x: (B, T, D) inputs, T ≥ 1; any strides, as all the others.
        dt: (B, T, D) step sizes, positive where A is to mean decay.
        A: (D, N) decay rates per step size, negative for decay.
        B: (B, T, N) what the states take from the input. Groups of channels with a B and C each belong into the batch.
        C: (B, T, N) what the output takes from the states.
        D: (D,) factor of the input itself in the output; nothing if not given.
        initial: (B, D, N) the state before the first step; zero if not given.
        backend: "reference" (a loop over time, any device and dtype), "cpu" (numba), "triton" (a GPU), or "auto": the
            fastest that can run.

    Returns:
        (B, T, D) the outputs in the dtype of x, and (B, D, N) the last state in the dtype in which it is carried.

    Raises:
        ValueError: If shapes or devices do not match, or the backend is unknown or cannot run on these tensors.
    """
    _check("selective_scan", ("B", "T", "D"), x, dt=dt, A=A, B=B, C=C, D=D, initial=initial)
    D = None if D is None else D.unsqueeze(-1)
    initial = None if initial is None else initial.unsqueeze(2)
    y, last = _scan(x.unsqueeze(-1), dt, A, B, C, D, initial, backend)
    return y.squeeze(-1), last.squeeze(2)


def state_space_dual(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Mamba-2's scan: the channels of a head share one step size, and all its states one decay.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_tᵀ,  y_t = h_t C_t + D x_t.  Source: Mamba-2 (arXiv 2405.21060), eq. 16 ff.

    Args:
        x: (B, T, H, P) inputs of H heads of P channels, T ≥ 1; any strides, as all the others.
        dt: (B, T, H) step sizes, positive where A is to mean decay.
        A: (H,) decay rates per step size, negative for decay.
        B: (B, T, N) what the states take from the input. Groups of heads with a B and C each belong into the batch.
        C: (B, T, N) what the output takes from the states.
        D: (H,) factor of the input itself in the output; nothing if not given.
        initial: (B, H, P, N) the state before the first step; zero if not given.
        backend: As for selective_scan.

    Returns:
        (B, T, H, P) the outputs in the dtype of x, and (B, H, P, N) the last state in the dtype in which it is carried.

    Raises:
        ValueError: If shapes or devices do not match, or the backend is unknown or cannot run on these tensors.
    """
    _check("state_space_dual", ("B", "T", "H", "P"), x, dt=dt, A=A, B=B, C=C, D=D, initial=initial)
    D = None if D is None else D.unsqueeze(-1).expand(x.shape[2:])
    return _scan(x, dt, A.unsqueeze(-1), B, C, D, initial, backend)


def _check(function: str, axes: tuple[str, ...], x: Tensor, **others: Tensor | None) -> None:
    """Raises ValueError unless all shapes follow from that of x, whose axes are named, and the N of B."""
    head, rates = axes[2], ((axes[2], "N") if len(axes) == 3 else (axes[2],))
    expected = {
        "dt": ("B", "T", head),
        "A": rates,
        "B": ("B", "T", "N"),
        "C": ("B", "T", "N"),
        "D": (head,),
        "initial": ("B", *axes[2:], "N"),
    }
    if x.dim() != len(axes) or x.shape[1] == 0:
        raise ValueError(f"{function} needs x of shape ({', '.join(axes)}) with T ≥ 1, got {tuple(x.shape)}.")
    B = others["B"]
    if B.dim() != 3 or B.shape[2] == 0:
        raise ValueError(f"{function} needs B of shape (B, T, N) with N ≥ 1, got {tuple(B.shape)}.")
    sizes = dict(zip(axes, x.shape, strict=True)) | {"N": B.shape[2]}
    for name, tensor in ({"x": x} | others).items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise ValueError(f"{function} needs real floating-point tensors, {name} is {tensor.dtype}.")
        if tensor.device != x.device:
            places = f"x on {x.device}, {name} on {tensor.device}"
            raise ValueError(f"{function} needs all tensors on one device, got {places}.")
        shape = x.shape if name == "x" else tuple(sizes[axis] for axis in expected[name])
        if tensor.shape != shape:
            letters = ", ".join(expected[name])
            raise ValueError(f"{function} needs {name} of shape ({letters}) = {shape}, got {tuple(tensor.shape)}.")


def _scan(x, dt, A, B, C, D, initial, backend) -> tuple[Tensor, Tensor]:
    """x (B, T, H, P), dt (B, T, H), A (H, N) or (H, 1), B and C (B, T, N), D (H, P), initial (B, H, P, N)."""
    inputs = (None if tensor is None else tensor.resolve_neg() for tensor in (x, dt, A, B, C, D, initial))
    slices = slices_in_use()
    if slices is not None:
        return SelectiveScanOfSlices.apply(*inputs, resolve_backend(x, backend), slices)
    return _SelectiveScan.apply(*inputs, resolve_backend(x, backend))


class _SelectiveScan(torch.autograd.Function):
    """Every backend's gradient: its own, or that of the reference where it is to be differentiated again."""

    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, initial, backend):
        y, last, boundaries = _forward(x, dt, A, B, C, D, initial, backend)
        ctx.save_for_backward(boundaries, x, dt, A, B, C, D, initial)
        ctx.backend = backend
        return y, last

    @staticmethod
    def backward(ctx, grad_y, grad_last):
        boundaries, *inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *selective_reference.gradients(inputs, grad_y, grad_last), None
        return *_backward(grad_y.resolve_neg(), grad_last.resolve_neg(), boundaries, *inputs, ctx.backend), None


def _forward(x, dt, A, B, C, D, initial, backend) -> tuple[Tensor, Tensor, Tensor]:
    if is_traced(x):
        return _forward_op(x, dt, A, B, C, D, initial, backend)
    return implementation("selective", backend).forward(x, dt, A, B, C, D, initial)


def _backward(grad_y, grad_last, boundaries, x, dt, A, B, C, D, initial, backend) -> tuple[Tensor | None, ...]:
    if is_traced(x):
        *gradients, grad_D, grad_initial = _backward_op(
            grad_y, grad_last, boundaries, x, dt, A, B, C, D, initial, backend
        )
        return *gradients, None if D is None else grad_D, None if initial is None else grad_initial
    return implementation("selective", backend).backward(grad_y, grad_last, boundaries, x, dt, A, B, C, D, initial)


@torch.library.custom_op("fprnn_lightning::selective_scan", mutates_args=())
def _forward_op(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return implementation("selective", backend).forward(x, dt, A, B, C, D, initial)


@_forward_op.register_fake
def _(x, dt, A, B, C, D, initial, backend):
    batch, time, heads, width = x.shape
    last = x.new_empty(batch, heads, width, B.shape[-1], dtype=carry_dtype(x.dtype))
    chunks = 0 if backend == "reference" else (time + CHUNK - 1) // CHUNK
    boundaries = last.new_empty(batch, chunks, B.shape[-1], heads * width)
    return torch.empty_like(x, memory_format=torch.contiguous_format), last, boundaries


@torch.library.custom_op("fprnn_lightning::selective_scan_backward", mutates_args=())
def _backward_op(
    grad_y: Tensor,
    grad_last: Tensor,
    boundaries: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = implementation("selective", backend).backward(grad_y, grad_last, boundaries, x, dt, A, B, C, D, initial)
    return tuple(x.new_empty(0) if gradient is None else gradient.contiguous() for gradient in gradients)


@_backward_op.register_fake
def _(grad_y, grad_last, boundaries, *inputs_and_backend):
    *inputs, _ = inputs_and_backend
    contiguous = torch.contiguous_format
    return tuple(
        grad_y.new_empty(0) if tensor is None else torch.empty_like(tensor, memory_format=contiguous)
        for tensor in inputs
    )
