"""The one tolerance: a backend is at most twice as inaccurate as the reference run in its own dtype, plus a few ulps.

max|actual - exact| ≤ 2 max|own - exact| + FLOOR_ULPS eps max|exact|        exact: the reference in float64
"""

import torch
from torch import Tensor

FACTOR = 2
FLOOR_ULPS = 4


def assert_as_accurate(name: str, actual: Tensor, own: Tensor, exact: Tensor) -> None:
    """Fails unless `actual` is as close to `exact` (float64) as `own`, the reference run in the dtype of `actual`."""
    assert actual.dtype == own.dtype, f"{name}: {actual.dtype}, expected {own.dtype}"
    assert actual.shape == exact.shape, f"{name}: {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    error = (actual - exact).abs().max().item()
    allowed = FACTOR * (own - exact).abs().max().item()
    allowed += FLOOR_ULPS * torch.finfo(actual.dtype).eps * exact.abs().max().item()
    assert error <= allowed, f"{name}: error {error:.1e}, allowed {allowed:.1e}"
