"""Run folders as fits leave them, written without training."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter

DENSE = {
    "class_path": "fprnn_lightning.mixers.dense.DenseMixer",
    "init_args": {
        "core": {"class_path": "fprnn_lightning.cores.gated_diagonal.GatedDiagonal"},
        "channel_mixer": {"class_path": "fprnn_lightning.channel_mixers.Householder", "init_args": {"rank": 1}},
    },
}
CONFIG = {
    "seed_everything": 0,
    "trainer": {"max_steps": 600, "default_root_dir": "logs", "enable_progress_bar": None, "callbacks": None},
    "model": {
        "mixer": {"class_path": "fprnn_lightning.mixers.lstm.LSTMMixer", "init_args": {"expand": 2.0}},
        "width": 32,
        "curriculum": {
            "class_path": "fprnn_lightning.training.ProgressiveLengths",
            "init_args": {"start": 3, "end": 16},
        },
    },
    "data": {
        "class_path": "fprnn_lightning.tasks.WordProblem",
        "init_args": {"group": "A5", "train_length": 16, "seed": 0},
    },
    "ckpt_path": None,
    "weights_only": True,
}
Scalar = tuple[float, int, str, float]  # wall time, step, tag, value


def _write_events(
    path: Path, scalars: Iterable[Scalar], start: float, resumed_at: int | None = None, **hparams: Any
) -> None:
    """An event file of one process: its first event, where it goes on from, HPARAMS, scalars."""
    events = [Event(wall_time=start, file_version="brain.Event:2")]
    if resumed_at is not None:
        events.append(Event(wall_time=start, step=resumed_at, session_log=SessionLog(status=SessionLog.START)))
    if hparams:
        info = SessionStartInfo()
        for name, value in hparams.items():
            setattr(info.hparams[name], "string_value" if isinstance(value, str) else "number_value", value)
        description = metadata.create_summary_metadata(HParamsPluginData(session_start_info=info))
        values = [Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=description)]
        events.append(Event(wall_time=start, summary=Summary(value=values)))
    for wall_time, step, tag, value in scalars:
        events.append(
            Event(wall_time=wall_time, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]))
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())


@pytest.fixture(scope="session")
def write_events() -> Callable[..., None]:
    """An event file of one process: its path, scalars, the wall time of its first event, and more."""
    return _write_events


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    def make(
        folder: Path,
        seed: int = 0,
        curve: dict[int, float] | None = None,
        validation: dict[int, float] | None = None,
        finished: bool = True,
        names: tuple[str, ...] = ("token_accuracy", "sequence_accuracy"),
        extra: Iterable[Scalar] = (),
        hparams: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Path:
        """A run that took 0.1 s a step.

        Args:
            folder: of the run.
            seed: of the run and its data.
            curve: accuracy by test length.
            validation: tokens right at length 16 after so many steps.
            finished: whether there was a test.
            names: the accuracies by length.
            extra: other scalars.
            hparams: of the HPARAMS tab.
            **settings: replace parts of the configuration, by their dotted names with _ _ for a dot.
        """
        curve = {16: 1.0, 50: 0.95, 128: 0.5} if curve is None else curve
        validation = {200: 0.5, 400: 0.99, 600: 1.0} if validation is None else validation
        config = copy.deepcopy(CONFIG)
        config["seed_everything"] = config["data"]["init_args"]["seed"] = seed
        for name, value in settings.items():
            *parents, last = name.split("__")
            part = config
            for parent in parents:
                part = part[parent]
            part[last] = value
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        scalars = []
        for steps, accuracy in validation.items():
            now, step = 1000 + steps / 10, steps - 1
            scalars += [(now, step, "train/loss", 1 - accuracy), (now, step, "train/tokens_per_second", 5000.0 + steps)]
            scalars += [(now, step, "validation/loss", 1 - accuracy), (now, step, "validation/bits_per_label", 1.0)]
            scalars += [
                (now, step, f"validation/{name}_16", accuracy) for name in ("token_accuracy", "sequence_accuracy")
            ]
            scalars += [(now, step, "validation/token_accuracy_50", accuracy / 2)]
        _write_events(folder / "events.out.tfevents.1000.host.1.0", [*scalars, *extra], 1000.0, **(hparams or {}))
        if finished:
            lines = [f"{length},{','.join([f'{accuracy:.6f}'] * len(names))},64" for length, accuracy in curve.items()]
            (folder / "length_curve.csv").write_text("\n".join([f"length,{','.join(names)},sequences", *lines, ""]))
        return folder

    return make
