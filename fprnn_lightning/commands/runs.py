"""What run folders hold: configuration, HPARAMS, scalars and the curve by length, of finished runs and of others.

A run is a folder with a config.yaml or with event files; the folders test_<n>, validate_<n> and predict_<n> in it are
none. It is finished once its final test has written length_curve.csv. Whatever cannot be read is told in the run's
warnings, and the rest is used.
"""

import csv
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fprnn_lightning.commands.event_files import Series, read_events
from fprnn_lightning.figures import class_name, mixer_label
from fprnn_lightning.sentences import concrete_subclasses
from fprnn_lightning.tasks import SequenceTask

EVENTS = "events.out.tfevents.*"
LATER = re.compile(r"(test|validate|predict)_\d+")  # folders of what is done with a checkpoint of a run
UNRELATED = {  # settings that do not change what is learnt and how it is measured
    *("seed_everything", "ckpt_path", "weights_only", "resume", "data.seed", "data.workers"),
    *("data.test_lengths", "data.test_sequences", "data.evaluation_batch_size"),
    *(f"trainer.{name}" for name in ("accelerator", "strategy", "plugins", "default_root_dir", "logger", "profiler")),
    *(f"trainer.enable_{name}" for name in ("checkpointing", "progress_bar", "model_summary", "autolog_hparams")),
    *(f"trainer.limit_{name}_batches" for name in ("test", "predict")),
    *("trainer.log_every_n_steps", "trainer.num_sanity_val_steps", "trainer.inference_mode", "trainer.deterministic"),
    *("trainer.benchmark", "trainer.detect_anomaly", "trainer.barebones", "trainer.model_registry"),
    *("trainer.use_distributed_sampler", "trainer.reload_dataloaders_every_n_epochs"),
}
NO_SERIES = Series(np.zeros(0, int), np.zeros(0), np.zeros(0))


@dataclass
class Run:
    """One training.

    Args:
        folder: where it is.
        config: its config.yaml, {} if that cannot be read.
        hyperparameters: of TensorBoard's HPARAMS, {} if there are none.
        scalars: by their tags.
        curve: rows of length_curve.csv, one a length.
        finished: whether its final test is over.
        written: wall time of its last event, None if there is none.
        warnings: sentences on what could not be read or is not as usual.
    """

    folder: Path
    config: dict[str, Any]
    hyperparameters: dict[str, Any]
    scalars: dict[str, Series]
    curve: list[dict[str, float]]
    finished: bool
    written: float | None
    warnings: list[str] = field(default_factory=list)

    @cached_property
    def settings(self) -> dict[str, str]:
        """What makes the run, but for its seed: dotted options and their values, classes without their modules."""
        named = ((name, value) for name, value in self.hyperparameters.items() if name != "seed")
        options = flatten(self.config) if self.config else ((name, spoken(value)) for name, value in named)
        kept = {name: value for name, value in options if not UNRELATED & {name, re.sub(r"\.\d+$", "", name)}}
        if "model.learning_rate" in kept and "learning_rate" in self.hyperparameters:  # which may have been found
            kept["model.learning_rate"] = spoken(self.hyperparameters["learning_rate"])
        return kept

    @property
    def task(self) -> str:
        """The name of its task."""
        data = part(self.config, "data")
        named = {cls.__name__: cls.name for cls in concrete_subclasses(SequenceTask) if isinstance(cls.name, str)}
        group = part(data, "init_args").get("group")
        fallbacks = (named.get(class_name(data)), group, self.folder.absolute().parent.parent.name)
        return str(self.hyperparameters.get("task") or next(filter(None, fallbacks))).lower()

    @property
    def label(self) -> str:
        """The label of its mixer, as of `mixer_label`."""
        named = (self.hyperparameters.get(name) for name in ("mixer", "core", "channel_mixer"))
        from_hyperparameters = " ".join(str(part) for part in named if part)
        return (
            mixer_label(part(self.config, "model", "mixer"))
            or from_hyperparameters
            or self.folder.absolute().parent.name
        )

    @property
    def seed(self) -> str:
        """The seed, and that of the data where it is another; "" if it is not known."""
        seed = self.config.get("seed_everything", self.hyperparameters.get("seed"))
        data = part(self.config, "data", "init_args").get("seed", seed)
        if seed is None or seed is True:
            return ""
        return spoken(seed) if data == seed else f"{spoken(seed)}, data {spoken(data)}"

    @property
    def trained_length(self) -> int | None:
        """The longest length in training, on the scale of the evaluated lengths; None if it is not known."""
        curriculum, data = part(self.config, "model", "curriculum", "init_args"), part(self.config, "data", "init_args")
        ends = [curriculum.get("end", curriculum.get("length")), data.get("longest", data.get("train_length"))]
        ends = [end for end in ends if isinstance(end, int)]
        if ends:
            return min(ends)
        length = self.hyperparameters.get("length")
        return int(length) if isinstance(length, float | int) else None

    @property
    def parameters(self) -> float | None:
        """How many the model has; None if it is not known."""
        return self.hyperparameters.get("parameters")

    @property
    def steps(self) -> int:
        """Optimiser steps so far."""
        ends = [s.steps[-1] + 1 for tag, s in self.scalars.items() if tag in ("train/loss", "validation/loss")]
        return int(max(ends, default=0))

    @property
    def max_steps(self) -> int | None:
        """The most optimiser steps that the configuration allows; None if it is not known."""
        steps = part(self.config, "trainer").get("max_steps")
        return steps if isinstance(steps, int) else None

    @property
    def minutes(self) -> float:
        """Minutes of training so far."""
        ends = [s.seconds[-1] for tag, s in self.scalars.items() if tag in ("train/loss", "validation/loss")]
        return float(max(ends, default=0)) / 60

    @property
    def status(self) -> str:
        """Finished or not, and when it was last heard of."""
        if self.finished:
            return "finished"
        when = f", last written {datetime.fromtimestamp(self.written):%Y-%m-%d %H:%M}" if self.written else ""
        return f"unfinished{when}"

    def series(self, tag: str) -> Series:
        """A scalar over the run, empty if it was not logged."""
        return self.scalars.get(tag, NO_SERIES)

    def validated(self, name: str, length: int) -> Series:
        """An accuracy in validation, at the longest length of at most `length`, else at the shortest."""
        found = {int(tag.rpartition("_")[2]): tag for tag in self.scalars if is_accuracy(tag, name)}
        return self.series(found[nearest_length(found, length)]) if found else NO_SERIES

    def iterations(self) -> Series:
        """Iterations of the solver in validation, the mean over the layers; empty where nothing iterates."""
        layers = [s for t, s in self.scalars.items() if re.fullmatch(r"validation/solver/layer_\d+/iterations", t)]
        if not layers:
            return NO_SERIES
        points = min(len(layer.steps) for layer in layers)
        return Series(
            layers[0].steps[:points],
            layers[0].seconds[:points],
            np.mean([layer.values[:points] for layer in layers], 0),
        )


def find_runs(folders: list[Path]) -> list[Path]:
    """The folders of runs in the given ones, at any depth, each once, in the order of their names."""
    found = {}
    for folder in folders:
        for path, inner, files in os.walk(folder):
            inner[:] = [name for name in inner if not LATER.fullmatch(name) and not name.startswith(".")]
            if "config.yaml" in files or any(name.startswith(EVENTS[:-1]) for name in files):
                found.setdefault(Path(path).resolve(), Path(path))
    parents = {parent for path in found for parent in path.parents}
    return sorted((path for real, path in found.items() if real not in parents or any(path.glob(EVENTS))), key=_natural)


def read_run(folder: Path) -> Run:
    """Reads what a run's folder holds, as far as that is possible."""
    events = read_events(list(folder.glob(EVENTS)))
    warnings = list(events.warnings)
    config = _read_config(folder / "config.yaml", warnings)
    curves = _read_curve(folder / "length_curve.csv", warnings), list(_logged_curve(events.scalars))
    curve = max(curves, key=len)  # the file's, but where it is cut off
    finished = (folder / "length_curve.csv").exists()
    run = Run(folder, config, events.hyperparameters, events.scalars, curve, finished, events.written, warnings)
    origin = config.get("ckpt_path")
    if origin and Path(origin).absolute().parent != folder.absolute() and run.steps:
        warnings.append(f"went on from {origin}, what was before is not in its curves")
    return run


def part(config: Any, *names: str) -> Mapping[str, Any]:
    """A part of a configuration, {} if there is none."""
    for name in names:
        config = config.get(name) if isinstance(config, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def flatten(config: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The dotted options of a configuration with their values; those of a class follow the class."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            inner = name if key in ("class_path", "init_args") else f"{name}.{key}".lstrip(".")
            yield from ((name, class_name(config)),) if key == "class_path" else flatten(value, inner)
    elif isinstance(config, list) and any(isinstance(each, Mapping) for each in config):
        for index, each in enumerate(config):
            yield from flatten(each, f"{name}.{index}")
    else:
        yield name, spoken(config)


def spoken(value: Any) -> str:
    """A value of a configuration as YAML has it, whole numbers without a point."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return f"[{', '.join(map(spoken, value))}]" if isinstance(value, list) else str(value)


def is_accuracy(tag: str, name: str) -> bool:
    """Whether a tag is that of an accuracy in validation, at some length."""
    return re.fullmatch(rf"validation/{name}_\d+", tag) is not None


def nearest_length(lengths: Mapping[int, Any] | list[int], length: int) -> int:
    """The longest of some lengths that is at most `length`, else the shortest."""
    return max((each for each in lengths if each <= length), default=min(lengths))


def _read_config(path: Path, warnings: list[str]) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        warnings.append("config.yaml is missing")
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = getattr(error, "strerror", None) or getattr(error, "problem", None) or "not UTF-8"
        warnings.append(f"config.yaml cannot be read, {problem}")
        return {}
    if not (part(config, "trainer") and part(config, "model") and part(config, "data") and "ckpt_path" in config):
        warnings.append("config.yaml is empty" if config is None else "config.yaml is cut off or of something else")
        return {}
    return config


def _read_curve(path: Path, warnings: list[str]) -> list[dict[str, float]]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        warnings.append(f"length_curve.csv cannot be read, {getattr(error, 'strerror', None) or 'not UTF-8'}")
        return []
    header, *lines = csv.reader(text.splitlines()) if text else ([],)
    try:
        rows = [dict(zip(header, map(float, line), strict=True)) for line in lines[: len(lines) - 1]]
    except ValueError:
        warnings.append("length_curve.csv is not a table of numbers")
        return []
    try:
        rows += [dict(zip(header, map(float, line), strict=True)) for line in lines[-1:] if text.endswith("\n")]
    except ValueError:
        text = text.rstrip("\n")
    if not text.endswith("\n") or "length" not in header or not rows:
        warnings.append(f"length_curve.csv is cut off, {len(rows)} rows of it are used")
    return rows if "length" in header else []


def _logged_curve(scalars: Mapping[str, Series]) -> Iterator[dict[str, float]]:
    """The curve by length as the events have it."""
    names = {tag.removeprefix("length_curve/"): s for tag, s in scalars.items() if tag.startswith("length_curve/")}
    for length in sorted({int(step) for series in names.values() for step in series.steps}):
        at_length = {name: series.values[series.steps == length] for name, series in names.items()}
        yield {"length": float(length)} | {name: float(values[-1]) for name, values in at_length.items() if len(values)}


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sorts run_10 after run_9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]
