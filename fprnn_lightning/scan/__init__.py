"""Linear recurrences over time; this room knows tensors and nothing else."""

from fprnn_lightning.scan.linear import linear_scan, resolve_backend

__all__ = ["linear_scan", "resolve_backend"]
