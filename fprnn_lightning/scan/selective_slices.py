"""The selective scan over slices of time: the passes of any backend over this slice, and the exchange between them.

See `context_parallel` for the equations. As every rank knows A, the product of decays exp(A sum_t dt_t) is known from
the H sums of dt; what is exchanged is hardly more than the last states, H P N numbers for each sequence. A rank in the
middle runs forward and backward twice, the first time for what it tells the others.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fprnn_lightning.scan.backends import carry_dtype, implementation
from fprnn_lightning.scan.context_parallel import TimeSlices


class SelectiveScanOfSlices(torch.autograd.Function):
    """The outputs of this slice and the state after it; initial is read on the first rank."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial: Tensor | None,
        backend: str,
        slices: TimeSlices,
    ) -> tuple[Tensor, Tensor]:
        scan, carry = implementation("selective", backend).forward, carry_dtype(x.dtype)
        starts, ends = slices.is_first(), slices.is_first(reverse=True)
        incoming = initial if starts else None
        last = torch.zeros(*x[:, 0].shape, B.shape[2], dtype=carry, device=x.device)
        if not ends:
            y, last, boundaries = scan(x, dt, A, B, C, D, incoming)
        sums = dt.sum(1, dtype=carry)
        every = slices.gather(torch.cat([sums.flatten(), last.flatten()]))
        every_sum, every_last = every.split([sums.numel(), last.numel()], 1)
        products = (every_sum.unflatten(1, sums.shape)[..., None] * A.to(carry)).exp().unsqueeze(3)  # slices B H 1 N
        if not starts:
            incoming = slices.incoming(products, every_last.unflatten(1, last.shape))
            y, last, boundaries = scan(x, dt, A, B, C, D, incoming)
        ctx.save_for_backward(products, boundaries, x, dt, A, B, C, D, incoming)
        ctx.has_initial, ctx.backend, ctx.slices = initial is not None, backend, slices
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        products, *saved = ctx.saved_tensors
        slices, backward = ctx.slices, implementation("selective", ctx.backend).backward
        starts, ends = slices.is_first(), slices.is_first(reverse=True)
        grad_y, grad_last = grad_y.resolve_neg(), grad_last.resolve_neg()
        start = torch.zeros_like(grad_last)
        if not starts:
            gradients = backward(grad_y, grad_last, *saved)
            start = gradients[-1]
        every = slices.gather(start)
        if not ends:
            gradients = backward(grad_y, grad_last + slices.incoming(products, every, reverse=True), *saved)
        *gradients, grad_initial = gradients
        if not starts:  # which is where initial is read
            grad_initial = torch.zeros_like(grad_initial) if ctx.has_initial else None
        return *gradients, grad_initial, None, None
