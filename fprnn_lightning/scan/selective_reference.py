"""The definition of the selective scan, a loop over time in plain torch operations of any dtype, and of its gradient.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_tᵀ        y_t = h_t C_t + D x_t

x (B, T, H, P) has H heads of P channels; dt (B, T, H) is a step size per head; A (H, N), or (H, 1) where all N states
of a head decay alike; B and C (B, T, N); D (H, P); the state (B, H, P, N). Every other backend is tested against this
file.
"""

import torch
from torch import Tensor

from fprnn_lightning.scan.backends import carry_dtype


def forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """y (B, T, H, P) in the dtype of x, the last state (B, H, P, N), and the states kept for backward: none."""
    given, dtype = x.dtype, carry_dtype(x.dtype)
    x, dt, A, B, C = (tensor.to(dtype) for tensor in (x, dt, A, B, C))
    state = x.new_zeros(*x[:, 0].shape, B.shape[-1]) if initial is None else initial.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None, None] * A[:, None])
        drive = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, None, None]
        state = decay * state + drive
        outputs.append((state * C[:, t, None, None]).sum(-1))
    y = torch.stack(outputs, dim=1)
    if D is not None:
        y = y + D.to(dtype) * x
    return y.to(given), state, x.new_empty(x.shape[0], 0, B.shape[-1], x.shape[2] * x.shape[3])


def backward(
    grad_y: Tensor, grad_last: Tensor, boundaries: Tensor, *inputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients to x, dt, A, B, C, D, initial (None where that is None), from those to y and the last state."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
    return gradients(leaves, grad_y, grad_last)


def gradients(
    inputs: list[Tensor | None], grad_y: Tensor, grad_last: Tensor, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """torch's own gradient of forward, to those of the inputs that require one."""
    wanted = [tensor is not None and tensor.requires_grad for tensor in inputs]
    with torch.enable_grad():
        y, last, _ = forward(*inputs)
        leaves = [tensor for tensor, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
        found = torch.autograd.grad((y, last), leaves, (grad_y, grad_last), create_graph=create_graph)
    found = iter(found)
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)
