"""The dense recurrence of FP-RNN's core and Householder as one differentiable function, for CPUs.

Per time step it is one matrix product, V s_{t-1}, and one numba kernel over everything else, in each direction; the
gradient of V is one product over all steps at the end. Equations: `dense.py` and `dense_kernels.py`.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fprnn_lightning.mixers.recurrent import shift


class DenseRecurrence(torch.autograd.Function):
    """States y (B, T, D) of the dense recurrence from y_0 = 0, in float32 or float64.

    Args:
        raw: terms of the input (B, T, K), as [decay D | directions R D | strengths R | input D].
        x: input of the core (B, T, D).
        weight: V (K, D), by which the raw terms read s_{t-1}; None if none of them does.
        rank: reflections R.
        normalise: whether s is y brought to unit root mean square, or y itself.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, raw: Tensor, x: Tensor, weight: Tensor | None, rank: int, normalise: bool) -> Tensor:
        from fprnn_lightning.mixers.dense_kernels import forward_step

        raw, x = raw.detach().clone(memory_format=torch.contiguous_format), x.detach().contiguous()
        gate = torch.empty_like(raw[..., : -x.shape[2]], memory_format=torch.contiguous_format)
        y = torch.empty_like(x)
        s = torch.empty_like(x) if normalise else y
        for t in range(x.shape[1]):
            if weight is not None and t > 0:
                raw[:, t].addmm_(s[:, t - 1], weight.detach().T)
            torch.sigmoid(raw[:, t, : -x.shape[2]], out=gate[:, t])
            forward_step(t, rank, normalise, raw, gate, x, y, s)
        ctx.save_for_backward(raw, gate, x, y, s, weight)
        ctx.rank, ctx.normalise = rank, normalise
        return y

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        from fprnn_lightning.mixers.dense_kernels import backward_step

        raw, gate, x, y, s, weight = ctx.saved_tensors
        grad_raw, grad_x = torch.empty_like(raw), torch.empty_like(x)
        carry, grad_s = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])
        tensors = raw, gate, x, y, s, grad_y.contiguous(), grad_s, carry, grad_raw, grad_x
        for t in reversed(range(x.shape[1])):
            backward_step(t, ctx.rank, ctx.normalise, *tensors)
            if weight is not None and t > 0:
                torch.mm(grad_raw[:, t], weight, out=grad_s)
        grad_weight = None
        if weight is not None:
            grad_weight = grad_raw.flatten(0, 1).T @ shift(s).flatten(0, 1)
        return grad_raw, grad_x, grad_weight, None, None
