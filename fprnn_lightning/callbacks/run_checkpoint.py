"""The two checkpoints that a run keeps of itself: last.ckpt, written at every validation, and best.ckpt, written at
those whose loss is the lowest so far.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


class RunCheckpoint(ModelCheckpoint):
    """Writes <folder>/<name>.ckpt at every validation, or at those that are the best so far.

    Args:
        folder: the run's.
        name: of the file.
        is_continued: whether the run goes on in its own folder, wherever that is now, so that the best so far counts;
            to a new run from a checkpoint it is nothing.
        monitor: what is lowest at the best; null writes every time.
    """

    def __init__(self, folder: Path, name: str, is_continued: bool, monitor: str | None = None) -> None:
        options = {"save_on_train_epoch_end": False, "enable_version_counter": False}
        super().__init__(folder, name, monitor, **options)
        self.name = name
        self.is_continued = is_continued

    @property
    def state_key(self) -> str:
        return f"RunCheckpoint {self.name}"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_continued:
            path = str(Path(self.dirpath) / f"{self.name}.ckpt")
            best = dict(zip([path], state["best_k_models"].values(), strict=False))
            paths = {name: path if state[name] else "" for name in PATHS}
            super().load_state_dict({**state, **paths, "dirpath": self.dirpath, "best_k_models": best})


PATHS = ("best_model_path", "kth_best_model_path", "last_model_path")
