"""Checkpoints as files: plain types and tensors, replaced whole, so that one can always be read.

What `read_checkpoint` reads is mapped, not copied: processes of one machine share its memory, and what of it is never
looked at takes none. A file that is replaced stays as it was to who has mapped it.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from fprnn_lightning.sentences import UsageError
from fprnn_lightning.whole_files import write_whole


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside its place and renames it: a process killed while writing loses none."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda partial: _save(checkpoint, partial))


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content, plain types and tensors on the CPU, mapped where the file is of the kind that can be.

    The file must not be written into as long as the tensors are used, only replaced.

    Raises:
        UsageError: if there is no such file or it is no checkpoint.
    """
    if not Path(path).is_file():
        raise UsageError(f"ckpt_path: file {path} does not exist")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # of damaged bytes, unpickling may raise any
        raise UsageError(f"ckpt_path: {path} is not a checkpoint, or not a whole one") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UsageError(f"ckpt_path: {path} holds no model, a checkpoint written by fit is needed")
    return checkpoint


def _save(checkpoint: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # of its own torch.save says nothing of why it could not write
        torch.save(checkpoint, file)
