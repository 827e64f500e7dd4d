"""Recurrences over time; this room knows tensors and nothing else."""

from fprnn_lightning.scan.backends import resolve_backend
from fprnn_lightning.scan.context_parallel import TimeSlices, context_parallel
from fprnn_lightning.scan.linear import linear_scan
from fprnn_lightning.scan.selective import selective_scan, state_space_dual

__all__ = [
    "TimeSlices",
    "context_parallel",
    "linear_scan",
    "resolve_backend",
    "selective_scan",
    "state_space_dual",
]
