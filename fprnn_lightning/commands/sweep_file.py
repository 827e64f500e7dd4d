"""The file of a sweep, read into runs: each a name and the arguments of its `fit`.

runs = product over `grid`, then those of `runs`;   a run = `config` and `options`, then what is its own
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from fprnn_lightning.sentences import UsageError, nearest, one_line

KEYS = ("config", "options", "grid", "runs")
RESERVED = {"compare", "lock", "slurm", "state"}  # what the folder of a sweep has besides, whatever its ending
SET_BY_SWEEP = {"trainer.default_root_dir": "--root", "ckpt_path": "--resume"}

Settings = dict[str, Any]  # keys of a configuration, dotted; config and seed are special


@dataclass(frozen=True)
class Run:
    """A run of a sweep.

    Args:
        name: made of what distinguishes it from the other runs.
        arguments: what follows `fit`.
    """

    name: str
    arguments: tuple[str, ...]


def read_sweep(path: Path) -> list[Run]:
    """The runs of a sweep.

    Raises:
        UsageError: if the file is not a sweep, names files that do not exist, or has the same run twice.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read, {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not YAML, {one_line(error)}") from error
    try:
        return _runs(content)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def _runs(content: Any) -> list[Run]:
    content = _mapping("the file", content)
    for key in content:
        if key not in KEYS:
            raise ValueError(f"unknown key {key}, {nearest(key, KEYS)}")
    common = {"config": content.get("config", []), **_mapping("options", content.get("options", {}))}
    axes = [list(_values(key, axis)) for key, axis in _mapping("grid", content.get("grid", {})).items()]
    combinations = list(product(*axes)) if axes else []
    named = _mapping("runs", content.get("runs", {}))
    for name in named:
        if name != _file_name(name) or name.partition(".")[0] in RESERVED:
            raise ValueError(f"runs: {name} cannot be a folder's name here, {_file_name(name) or 'run'}_0 could")
    combinations += [((name, _mapping(f"runs: {name}", own)),) for name, own in named.items()]
    if not combinations:
        raise ValueError("names no run, it needs a grid or runs")
    runs: dict[str, Run] = {}
    names: dict[tuple[str, ...], str] = {}
    for combination in combinations:
        name = "-".join(label for label, _ in combination)
        arguments = _arguments([common, *(settings for _, settings in combination)])
        if (same := names.setdefault(arguments, name)) != name:
            raise ValueError(f"runs {same} and {name} are the same")
        if name in runs:
            raise ValueError(f"two runs are called {name}; give values names, as in `grid: {{mixer: {{name: {{…}}}}}}`")
        runs[name] = Run(name, arguments)
    return list(runs.values())


def _values(key: str, axis: Any) -> Iterator[tuple[str, Settings]]:
    """What an axis of the grid offers: names and settings."""
    where = f"grid: {key}"
    if isinstance(axis, dict) and axis:
        for name, settings in axis.items():
            yield _file_name(name), _mapping(f"{where}: {name}", settings)
    elif isinstance(axis, list) and axis:
        for value in axis:
            yield _label(key, value), {key: value}
    else:
        raise ValueError(f"{where}: expected a list of values, or names with their options, got {json.dumps(axis)}")


def _label(key: str, value: Any) -> str:
    """A value in a folder's name: dense for configs/mixer/dense.yaml, seed_0, gradient_OneStep."""
    if key == "config":
        return _file_name("+".join(Path(each).stem for each in _paths(value)))
    if isinstance(value, dict) and "class_path" in value:
        value = " ".join([value["class_path"].rpartition(".")[2], *map(_text, value.get("init_args", {}).values())])
    return f"{key.rpartition('.')[2]}_{_file_name(_text(value))}"


def _arguments(layers: list[Settings]) -> tuple[str, ...]:
    """Arguments of fit: the configurations of all layers, then their options, later ones instead of earlier ones."""
    configs = [path for layer in layers for path in _paths(layer.get("config", []))]
    for path in configs:
        if not Path(path).is_file():
            raise ValueError(f"config: file {path} does not exist")
    options = {}
    for layer in layers:
        for key, value in _flat({key: value for key, value in layer.items() if key != "config"}):
            if key in SET_BY_SWEEP:
                raise ValueError(f"{key} is set by the sweep, see its {SET_BY_SWEEP[key]}")
            options.pop(key, None)
            options[key] = _text(value)
    return (
        *(f"--config={path}" for path in configs),
        *(f"--{key}={value}" for key, value in options.items()),
    )


def _flat(settings: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; `seed` is that of the model and that of the data. A class with its options is a value."""
    for key, value in settings.items():
        if isinstance(value, dict) and value and "class_path" not in value:
            yield from _flat(value, f"{prefix}{key}.")
        elif not prefix and key == "seed":
            yield from (("seed_everything", value), ("data.seed", value))
        else:
            yield f"{prefix}{key}", value


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where}: expected keys with values, got {json.dumps(value, default=str)}")
    return value


def _paths(value: Any) -> list[str]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"config: expected a file or a list of files, got {json.dumps(value, default=str)}")
    return paths


def _text(value: Any) -> str:
    """A value as an option of the command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", text).strip("._")
