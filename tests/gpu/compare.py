"""What a report says beside tests and timings: the error of the GPU backend, and its time beside mamba_ssm's.

error = max|actual - exact| / max|exact|, exact being the reference in float64; of a gradient, the worst of all.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fprnn_lightning.commands import bench

CASES = (
    (bench.linear_case, (4, 1025, 96)),
    (bench.selective_case, (2, 257, 96, 16)),
    (bench.dual_case, (2, 257, 128, 32)),
)


def errors(device: str) -> Iterator[str]:
    """The rows of a table: op, dtype, error of the result, error of the gradients."""
    yield "| op | dtype | error | error of gradients |\n|---|---|---|---|"
    torch.manual_seed(0)
    for case, shape in CASES:
        with torch.device(device):
            function, inputs = case(*shape)
            grad = torch.randn_like(inputs[0])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rounded = [tensor.to(dtype) for tensor in (*inputs, grad)]
            actual = _run(function, rounded, "auto")
            exact = _run(function, [tensor.double() for tensor in rounded], "reference")
            result, *gradients = (
                ((a - e).abs().max() / e.abs().max()).item() for a, e in zip(actual, exact, strict=True)
            )
            name = str(dtype).removeprefix("torch.")
            yield f"| {function.__name__} | {name} | {result:.1e} | {max(gradients):.1e} |"


def mamba_ssm() -> str:
    """One sentence on selective_scan beside mamba_ssm's kernel, in float32, each in its own layout."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError:
        return "mamba_ssm is not installed, so selective_scan was not timed against its kernel."
    shape = (8, 2048, 2048, 16)
    with torch.device("cuda"):
        function, (x, *others) = bench.selective_case(*shape)
        grad = torch.randn_like(x)
    x, dt, A, B, C, D = leaves = [tensor.requires_grad_() for tensor in (x, *others)]
    theirs = [t.detach().mT.contiguous().requires_grad_() for t in (x, dt, B, C)]
    their_leaves = [*theirs[:2], A, *theirs[2:], D]
    calls = (
        partial(_forward_backward, lambda *inputs: function(*inputs)[0], leaves, grad),
        partial(_forward_backward, selective_scan_fn, their_leaves, grad.mT.contiguous()),
    )
    ours, their = bench.medians(bench.gpu_clock, *calls)
    with torch.no_grad():
        forward, their_forward = bench.medians(
            bench.gpu_clock, partial(function, *leaves), partial(selective_scan_fn, *their_leaves)
        )
    return (
        f"selective_scan {shape} beside mamba_ssm's kernel: forward {1e3 * forward:.2f} ms, theirs"
        f" {1e3 * their_forward:.2f}; forward+backward {1e3 * ours:.2f} ms, theirs {1e3 * their:.2f}."
    )


def _run(function: Callable, tensors: list[Tensor], backend: str) -> tuple[Tensor, ...]:
    *inputs, grad = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = function(*leaves, backend=backend)
    result = result if isinstance(result, Tensor) else result[0]
    return result.detach(), *torch.autograd.grad(result, leaves, grad)


def _forward_backward(function: Callable, leaves: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*leaves), leaves, grad)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join([*errors("cuda"), "", mamba_ssm(), ""]))
