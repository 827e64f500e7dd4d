"""Sequence mixers, B T D -> B T D. Every file of this folder is imported, so a new mixer is one new file."""

from importlib import import_module
from pkgutil import iter_modules

from fprnn_lightning.mixers.base import SequenceMixer

for _module in iter_modules(__path__):
    if not _module.name.endswith("_kernels"):
        import_module(f"{__name__}.{_module.name}")

__all__ = ["SequenceMixer"]
