"""The fused iteration's Triton kernel as `compile_kernels` compiles it: types, directions, and what reads the state."""

from collections.abc import Iterator

from compile_kernels import Case

from fprnn_lightning.mixers.fused_step_triton_kernels import num_warps, step_kernel

READS = ("decay_read", "mixer_read", "input_read")


def cases(warp: int) -> Iterator[Case]:
    for kind, read, rank, product, block, reads in (
        ("fp32", "fp32", 1, True, 256, READS),
        ("fp32", "bf16", 1, True, 256, READS),
        ("fp32", "fp32", 3, True, 1024, READS),
        ("fp32", "fp32", 3, False, 1024, READS[1:]),
        ("fp32", "fp32", 1, True, 16, ()),
        ("fp64", "fp64", 2, True, 512, READS),
    ):
        pointers = dict.fromkeys(("raw", "x", "y", "out", "change", "size"), f"*{kind}:16")
        pointers |= {name: f"*{read}" if name in reads else None for name in READS}
        strides = [f"{tensor}_{axis}" for tensor in ("raw", "read", "x", "y") for axis in "bt"]
        constants = {"SHORTEST": 1e-6, "EPSILON": 1e-6, "R": rank, "PRODUCT": product, "NORMALISE": True}
        arguments = pointers | dict.fromkeys([*strides, "T", "D"], "i32") | constants | {"BLOCK_D": block}
        name = f"{kind} {read} rank {rank} {'product' if product else 'sum'} {block} {len(reads)} reads"
        yield Case(name, step_kernel, arguments, num_warps(block))
