"""Cores, diagonal sequence mixers of a mixed input. Every file here is imported: a new one is one new file."""

from importlib import import_module
from pkgutil import iter_modules

from fprnn_lightning.cores.base import Core

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Core"]
