"""Fixed-point recurrent networks, from diagonal to dense.

Axes in every signature and shape comment: B batch, T time, D channels inside a layer, N state per channel, R rank of
the channel mixer, V vocabulary.

`fprnn_lightning.load_pretrained(folder)` is a model that `export` has written; it is imported when it is asked for.
"""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load_pretrained":
        from fprnn_lightning.pretrained import load_pretrained

        return load_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
