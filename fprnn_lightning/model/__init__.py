"""Models built from sequence mixers."""

from fprnn_lightning.model.sequence_model import SequenceModel

__all__ = ["SequenceModel"]
