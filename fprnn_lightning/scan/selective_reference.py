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
    given = x.dtype
    x, dt, A, B, C, D, initial = _carried(x, dt, A, B, C, D, initial)
    state, outputs = _initial(x, B, initial), []
    for t in range(x.shape[1]):
        state = _step(state, x, dt, A, B, t)
        outputs.append((state * C[:, t, None, None]).sum(-1))
    y = torch.stack(outputs, dim=1)
    if D is not None:
        y = y + D * x
    return y.to(given), state, x.new_empty(x.shape[0], 0, B.shape[-1], x.shape[2] * x.shape[3])


def backward(
    grad_y: Tensor, grad_last: Tensor, boundaries: Tensor, *inputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients to x, dt, A, B, C, D, initial (None where that is None), from those to y and the last state.

    With the gradient g to y, a = exp(dt A) and u = dt x, from the last step to the first:
        λ_t = C_t g_t + a_{t+1} λ_{t+1},   q_t = λ_t a_t h_{t-1}, the gradient to dt_t A,
        du = Σ_n B λ,  dx = dt du + D g,  ddt = Σ_n A q + x du,  dA = Σ_t dt q,  dB = Σ_d λ u,  dC = Σ_d g h
    """
    x, dt, A, B, C, D, initial = _carried(*inputs)
    g, adjoint = grad_y.to(x.dtype), grad_last
    states = [_initial(x, B, initial)]
    for t in range(x.shape[1]):
        states.append(_step(states[-1], x, dt, A, B, t))
    grad_x, grad_dt, grad_B, grad_C = (torch.empty_like(tensor) for tensor in (x, dt, B, C))
    grad_A = torch.zeros(A.shape[0], B.shape[-1], dtype=x.dtype, device=x.device)
    for t in reversed(range(x.shape[1])):
        adjoint = adjoint + C[:, t, None, None] * g[:, t, ..., None]
        grad_B[:, t] = (adjoint * (dt[:, t, :, None] * x[:, t])[..., None]).sum((1, 2))
        grad_C[:, t] = (g[:, t, ..., None] * states[t + 1]).sum((1, 2))
        grad_drive = (adjoint * B[:, t, None, None]).sum(-1)
        adjoint = torch.exp(dt[:, t, :, None, None] * A[:, None]) * adjoint
        grad_exponent = (adjoint * states[t]).sum(2)
        grad_A += (dt[:, t, :, None] * grad_exponent).sum(0)
        grad_dt[:, t] = (A * grad_exponent).sum(-1) + (x[:, t] * grad_drive).sum(-1)
        grad_x[:, t] = dt[:, t, :, None] * grad_drive
    if D is not None:
        grad_x = grad_x + D * g
    gradients = grad_x, grad_dt, grad_A.sum_to_size(A.shape), grad_B, grad_C, (g * x).sum((0, 1)), adjoint
    return tuple(
        None if tensor is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip(gradients, inputs, strict=True)
    )


def gradients(inputs: list[Tensor | None], grad_y: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
    """The same by torch, itself differentiable; only to those of the inputs that require a gradient."""
    with torch.enable_grad():
        # as views, since an input may also be what another was computed from
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        y, last, _ = forward(*inputs)
        wanted = [tensor is not None and tensor.requires_grad for tensor in inputs]
        leaves = [tensor for tensor, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
        found = iter(torch.autograd.grad((y, last), leaves, (grad_y, grad_last), create_graph=True))
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)


def _carried(*inputs: Tensor | None) -> list[Tensor | None]:
    dtype = carry_dtype(inputs[0].dtype)
    return [None if tensor is None else tensor.to(dtype) for tensor in inputs]


def _initial(x: Tensor, B: Tensor, initial: Tensor | None) -> Tensor:
    return x.new_zeros(*x[:, 0].shape, B.shape[-1]) if initial is None else initial


def _step(state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, t: int) -> Tensor:
    drive = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, None, None]
    return torch.exp(dt[:, t, :, None, None] * A[:, None]) * state + drive
