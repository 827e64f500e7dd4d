"""The linear scan's Triton kernel in every configuration, as `compile_kernels` compiles it."""

import itertools
from collections.abc import Iterator

from compile_kernels import Case

from fprnn_lightning.scan.linear_triton_kernels import CONFIGS, scan_kernel

TYPES = {2: "bf16", 4: "fp32", 8: "fp64"}


def cases(warp: int) -> Iterator[Case]:
    for ((backward, few, size), config), split, aligned in itertools.product(
        CONFIGS.items(), (False, True), (True, False)
    ):
        if (split and not few) or (not aligned and (size == 8 or few != split)):
            continue
        divisible = ":16" if aligned else ""
        tensors = ["decay", "drive", "out", *(["states", "product", "first"] if backward else [])]
        tensors += ["initial"] if aligned else []
        absent = dict.fromkeys(["initial", "states", "product", "first", "workspace"])
        pointers = dict.fromkeys(tensors, f"*{TYPES[size]}{divisible}")
        workspace = {"workspace": "*i64:16" if size == 8 else "*i32:16"} if split else {}
        strides = ["decay_b", "decay_t", "drive_b", "drive_t", "out_t", "D"]
        integers = dict.fromkeys(strides, f"i32{divisible}") | {"B": "i32", "T": "i32"}
        arguments = absent | pointers | workspace | integers | {"BACKWARD": backward} | config.kwargs
        words = "backward" if backward else "forward", TYPES[size], "few" * few, "split" * split
        yield Case(
            " ".join([*filter(None, words), "unaligned" * (not aligned)]), scan_kernel, arguments, config.num_warps
        )
