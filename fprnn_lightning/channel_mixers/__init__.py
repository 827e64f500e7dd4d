"""Channel mixers, the matrix Q_t on the channels. Every file here is imported: a new one is one new file."""

from importlib import import_module
from pkgutil import iter_modules

from fprnn_lightning.channel_mixers.base import ChannelMixer

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["ChannelMixer"]
