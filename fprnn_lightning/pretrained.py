"""Exported models: a folder with the weights as safetensors and, in config.json, all that is needed to build the model
around them. `export` writes it, `load_pretrained` makes of it what it was made of, to the bit.

    config.json   {"format": "fprnn_lightning", "format_version": 1, "versions": {...}, "step": ...,
                   "task": {"class_path": ..., "init_args": {...}} or null, "model": {...}}
"""

import json
from inspect import isclass
from pathlib import Path
from pydoc import locate
from typing import Any

from lightning.pytorch.cli import instantiate_module
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fprnn_lightning.mixers.base import SequenceMixer
from fprnn_lightning.sentences import concrete_subclasses
from fprnn_lightning.tasks.base import SequenceTask
from fprnn_lightning.training import SequenceLearner

PACKAGE = "fprnn_lightning."
FORMAT = "fprnn_lightning"
FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def load_pretrained(folder: str | Path) -> SequenceLearner:
    """A model that `export` has written, on the CPU and ready to use; nothing needs to be known of how it was trained.

    It is in evaluation mode. Calling it gives logits (B, T) -> (B, T, V), `predict` the likeliest labels, `generate`
    what follows a prompt; a Trainer can test it or, after `.train()`, train it further.

    Args:
        folder: what `export` has made.

    Raises:
        ValueError: if there is no such folder, it is of another kind or a newer format, or the weights are not those of
            the model that config.json describes.
    """
    config = read_config(folder)
    exported = read_export(folder)
    try:
        learner = build(exported["hyper_parameters"] | {"compile": False})
    except ValueError as error:
        raise ValueError(f"{Path(folder) / CONFIG_FILE}, format {config['format_version']}: {error}") from error
    check_weights(exported["state_dict"], learner.state_dict(), str(Path(folder) / WEIGHTS_FILE))
    learner.load_state_dict(exported["state_dict"])
    return learner.eval()


def read_export(folder: str | Path) -> dict[str, Any]:
    """What a checkpoint says of a model, from an exported folder.

    Returns:
        hyper_parameters, plain types, and state_dict, tensors by name.

    Raises:
        ValueError: if there is no such folder, it is of another kind or a newer format, or has no weights.
    """
    config, path = read_config(folder), Path(folder) / WEIGHTS_FILE
    try:
        weights: dict[str, Tensor] = load_file(path)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no {WEIGHTS_FILE}") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is not a whole file of safetensors") from error
    return {"hyper_parameters": config["model"], "state_dict": weights}


def read_config(folder: str | Path) -> dict[str, Any]:
    """An exported folder's config.json.

    Raises:
        ValueError: if there is no such folder, or it is of another kind or a newer format.
    """
    path = Path(folder) / CONFIG_FILE
    if not Path(folder).is_dir():
        raise ValueError(f"folder {folder} does not exist, one that export has made is needed")
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{folder} has no {CONFIG_FILE}, a folder that export has made is needed") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT or not isinstance(config.get("model"), dict):
        raise ValueError(f'{path} is not of {FORMAT}, whose files have "format": "{FORMAT}" and a "model"')
    if not isinstance(version := config.get("format_version"), int) or version > FORMAT_VERSION:
        raise ValueError(
            f"{path} is of format {version}, this version reads up to {FORMAT_VERSION}: update the package"
        )
    return config


def build(hyper_parameters: dict[str, Any]) -> SequenceLearner:
    """The learner that these hyper-parameters describe, with new weights.

    Raises:
        ValueError: if they describe none.
    """
    check_classes(hyper_parameters)
    try:
        return instantiate_module(SequenceLearner, hyper_parameters)
    except (Exception, SystemExit) as error:  # the parser's error, or a constructor's
        raise ValueError(f"the model cannot be built: {' '.join(str(error).split())[:300]}") from error


def check_classes(description: Any) -> None:
    """Sees to it that what comes out of a file does not choose what code is run.

    Args:
        description: hyper-parameters, a task, or any part of them.

    Raises:
        ValueError: if they name what is neither a class of this package nor a mixer or task that is imported already.
    """
    if isinstance(description, dict):
        path = str(description.get("class_path", ""))
        if "." in path and not (_is_own(path) or path in _imported()):
            raise ValueError(
                f"{path} is not a class of {FORMAT}; import what you trust before, or give it as an option"
            )
        description = list(description.values())
    if isinstance(description, list | tuple):
        for part in description:
            check_classes(part)


def _is_own(path: str) -> bool:
    return path.startswith(PACKAGE) and isclass(locate(path))


def _imported() -> set[str]:
    classes = [cls for base in (SequenceMixer, SequenceTask) for cls in concrete_subclasses(base)]
    return {f"{cls.__module__}.{cls.__qualname__}" for cls in classes}


def check_weights(saved: dict[str, Tensor], built: dict[str, Tensor], name: str) -> None:
    """Raises ValueError, naming the first tensor that differs, unless both have the same names and shapes."""
    for part in {**built, **saved}:
        there, here = (str(tuple(each[part].shape)) if part in each else "absent" for each in (saved, built))
        if there != here:
            raise ValueError(f"{name}: {part} is {there} in it and {here} in the model")
