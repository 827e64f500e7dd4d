"""The definition of the linear scan, a loop over time in plain torch operations of any dtype, and of its gradient.

    h_t = decay_t h_{t-1} + drive_t
    λ_t = grad_t + decay_{t+1}* λ_{t+1},  grad_drive_t = λ_t,  grad_decay_t = λ_t h_{t-1}*,  grad_initial = decay_1* λ_1

The gradient is the same scan run backwards over decays shifted by one step (* conjugates). Every other backend is
tested against this file.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def forward(decay: Tensor, drive: Tensor, initial: Tensor | None, reverse: bool) -> Tensor:
    """All states (B, T, ...) of the scan over decay and drive (B, T, ...) from the state initial (B, ...) or zero."""
    steps = range(decay.shape[1])
    states: list[Tensor] = []
    for t in reversed(steps) if reverse else steps:
        initial = drive[:, t] if initial is None else decay[:, t] * initial + drive[:, t]
        states.append(initial)
    return torch.stack(states[::-1] if reverse else states, dim=1)


def backward(
    grad: Tensor,
    decay: Tensor,
    initial: Tensor | None,
    states: Tensor,
    reverse: bool,
    needed: tuple[bool, bool, bool] = (True, True, True),
    scan: Callable[[Tensor, Tensor, Tensor | None, bool], Tensor] = forward,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients to decay, drive and initial where needed, from that to the states; differentiable if scan is."""
    grad_drive = scan(decay.conj().roll(1 if reverse else -1, dims=1), grad, None, not reverse)
    first = -1 if reverse else 0
    grad_decay = grad_initial = None
    if needed[0]:
        start = (torch.zeros_like(states[:, 0]) if initial is None else initial).unsqueeze(1)
        previous = torch.cat([states[:, 1:], start] if reverse else [start, states[:, :-1]], dim=1)
        grad_decay = grad_drive * previous.conj()
    if needed[2]:
        grad_initial = decay[:, first].conj() * grad_drive[:, first]
    return grad_decay, grad_drive if needed[1] else None, grad_initial
