"""The linear scan over slices of time: the passes of any backend over this slice, and the exchange between them.

See `context_parallel` for the equations. A rank's own backward, given g_r with the gradient to its last state, finds
all gradients of the slice; no gradient goes through what is exchanged otherwise.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fprnn_lightning.scan.backends import implementation
from fprnn_lightning.scan.context_parallel import TimeSlices


class LinearScanOfSlices(torch.autograd.Function):
    """The states of this slice; initial is read on the first rank in the scan's direction."""

    @staticmethod
    def forward(
        ctx,
        decay: Tensor,
        drive: Tensor,
        initial: Tensor | None,
        reverse: bool,
        backend: str,
        slices: TimeSlices,
    ) -> Tensor:
        scan, last = implementation("linear", backend).forward, 0 if reverse else -1
        starts, ends = slices.is_first(reverse), slices.is_first(not reverse)
        incoming = initial if starts else None
        product = end = torch.zeros_like(drive[:, 0])
        if not ends:
            states = scan(decay, drive, incoming, reverse)
            end = states[:, last]
        if not (starts or ends):
            product = decay.prod(1)
        products, every_end = slices.gather(torch.stack([product, end])).unbind(1)
        if not starts:
            incoming = slices.incoming(products, every_end, reverse=reverse)
            states = scan(decay, drive, incoming, reverse)
        ctx.save_for_backward(decay, incoming, states, products)
        ctx.has_initial, ctx.reverse, ctx.backend, ctx.slices = initial is not None, reverse, backend, slices
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        decay, incoming, states, products = ctx.saved_tensors
        slices, reverse, last = ctx.slices, ctx.reverse, 0 if ctx.reverse else -1
        starts, ends = slices.is_first(reverse), slices.is_first(not reverse)
        backward, grad = implementation("linear", ctx.backend).backward, grad.resolve_conj().resolve_neg()
        wanted = *ctx.needs_input_grad[:2], not starts or ctx.needs_input_grad[2]
        start = torch.zeros_like(states[:, last])
        if ends:
            gradients = backward(grad, decay, incoming, states, reverse, wanted)
            start = gradients[2]
        elif not starts:
            start = backward(grad, decay, incoming, states, reverse, (False, False, True))[2]
        starts_of_all = slices.gather(start)
        if not ends:
            grad = grad.clone(memory_format=torch.contiguous_format)
            grad[:, last] += slices.incoming(products.conj(), starts_of_all, reverse=not reverse)
            gradients = backward(grad, decay, incoming, states, reverse, wanted)
        grad_decay, grad_drive, grad_initial = gradients
        if not starts:  # which is where initial is read
            grad_initial = torch.zeros_like(grad_initial) if ctx.has_initial else None
        return grad_decay, grad_drive, grad_initial, None, None, None
