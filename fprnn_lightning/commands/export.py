"""A checkpoint's model as a folder that needs no checkpoint, no run and no configuration: weights, what builds the
model around them, and a card for people.
"""

import csv
import inspect
import json
import os
import shutil
from pathlib import Path
from pydoc import locate
from typing import Any

import lightning
import torch
import yaml
from safetensors.torch import save

from fprnn_lightning import __version__
from fprnn_lightning.pretrained import CONFIG_FILE, FORMAT, FORMAT_VERSION, WEIGHTS_FILE, build, check_weights
from fprnn_lightning.sentences import UsageError
from fprnn_lightning.training.checkpoint_file import read_checkpoint

CARD = """\
# {title}

A sequence model of the package `fprnn_lightning`, exported from `{checkpoint}` after {steps:,} training steps.

| | |
|---|---|
{facts}
{accuracies}
## Use

```python
import torch
import fprnn_lightning

model = fprnn_lightning.load_pretrained("{folder}")
tokens = torch.tensor([[0, 1, 0]])  # (B, T), each below {vocab_size}
logits = model(tokens)  # (B, T, {vocab_size})
labels = model.predict(tokens)  # the likeliest, (B, T)
following = model.generate(tokens, length=8)  # (B, 8)
```

```bash
python -m fprnn_lightning generate --pretrained {folder} --length 8 --prompt {prompt}
```

`{weights}` holds the weights, `{config}` all that builds the model around them.
"""


def export(ckpt_path: Path, output: Path) -> None:
    """Writes a checkpoint's model into a folder: model.safetensors, config.json and README.md.

    The folder is all that `fprnn_lightning.load_pretrained` and `generate` need, and is there when it is complete. The
    task is read from the config.yaml beside the checkpoint, accuracies from its length_curve.csv, if there are any.

    Args:
        ckpt_path: A checkpoint that fit has written, such as logs/a5/dense/run_0/best.ckpt.
        output: Folder to make; one that exists must be empty.

    Raises:
        ValueError: If the folder holds something or cannot be made, or the model cannot be built from the checkpoint.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"output: {output} exists already, and is no empty folder")
    checkpoint = read_checkpoint(ckpt_path)
    saved = checkpoint.get("hyper_parameters", {})
    model = {name: value for name, value in saved.items() if name[0] != "_"}
    if "mixer" not in model:
        raise ValueError(
            f"ckpt_path: {ckpt_path} does not say how its model is built (no hyper_parameters with a mixer), "
            "one that the command line's fit has written is needed"
        )
    learner = build(model)
    check_weights(checkpoint["state_dict"], learner.state_dict(), f"ckpt_path: {ckpt_path}")
    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "versions": {"fprnn_lightning": __version__, "torch": torch.__version__, "lightning": lightning.__version__},
        "step": checkpoint["global_step"],
        "task": read_task(ckpt_path.parent / "config.yaml"),
        "model": model,
    }
    weights = {
        name: part.clone(memory_format=torch.contiguous_format) for name, part in checkpoint["state_dict"].items()
    }
    parameters = sum(parameter.numel() for parameter in learner.parameters())
    temporary = output.parent / f".{output.name}.{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", "utf-8")
        (temporary / "README.md").write_text(card(config, ckpt_path, output.name, parameters), "utf-8")
        (temporary / WEIGHTS_FILE).write_bytes(save(weights, metadata={"format": "pt"}))
        temporary.rename(output)
    except OSError as error:
        raise ValueError(f"output: cannot make {output}, {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    task = "" if config["task"] else "; the task is not known, as there is no config.yaml beside the checkpoint"
    print(f"{output}: {parameters:,} parameters after {config['step']:,} steps{task}")


def read_task(path: Path) -> dict[str, Any] | None:
    """The task's class and options from a run's config.yaml; None if there is no such file.

    Raises:
        UsageError: if the file is not a run's.
    """
    if not path.is_file():
        return None
    try:
        return yaml.safe_load(path.read_text("utf-8"))["data"]
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not the configuration of a run, it has no data") from error


def card(config: dict[str, Any], ckpt_path: Path, name: str, parameters: int) -> str:
    """The text of README.md."""
    model, task = config["model"], config["task"]
    mixer = model["mixer"]
    facts = {"mixer": f"{short_name(mixer)}: {purpose(mixer)}"}
    facts |= {name.replace("_", " "): shown(value) for name, value in mixer.get("init_args", {}).items()}
    if task:
        options = ", ".join(f"{name} {shown(value)}" for name, value in task.get("init_args", {}).items())
        facts |= {"task": f"{short_name(task)}: {purpose(task)}", "task's options": options}
    facts |= {
        "vocabulary": f"{model['vocab_size']} tokens",
        "width": model["width"],
        "layers": model["layers"],
        "parameters": f"{parameters:,}",
        "versions": ", ".join(f"{name} {version}" for name, version in config["versions"].items()),
    }
    title = f"{short_name(mixer)} on {short_name(task)}" if task else short_name(mixer)
    return CARD.format(
        title=title,
        checkpoint=Path(*ckpt_path.absolute().parts[-4:]),
        steps=config["step"],
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        accuracies=accuracies(ckpt_path),
        folder=name,
        vocab_size=model["vocab_size"],
        prompt='"Once"' if model.get("unit") == "byte" else '"0 1 0"',
        weights=WEIGHTS_FILE,
        config=CONFIG_FILE,
    )


def accuracies(ckpt_path: Path) -> str:
    """The run's table by length, of its last weights; empty if the run has not been measured."""
    path = ckpt_path.parent / "length_curve.csv"
    if not path.is_file():
        return ""
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    whose = "these weights" if ckpt_path.name == "last.ckpt" else "the run's last weights, which need not be these"
    lines = [f"\n## Accuracies by length\n\nOf {whose}, on the test set:\n", "| " + " | ".join(header) + " |"]
    lines.append("|" + "---|" * len(header))
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines).replace("_", " ") + "\n"


def short_name(described: dict[str, Any]) -> str:
    """The name of a class that a configuration describes."""
    return described["class_path"].rpartition(".")[2]


def purpose(described: dict[str, Any]) -> str:
    """The first sentence about a class that a configuration describes; empty if it cannot be imported."""
    text = " ".join((inspect.getdoc(locate(described["class_path"])) or "").split())
    return text.partition(". ")[0].rstrip(".")


def shown(value: Any) -> str:
    """A value of a configuration on one line."""
    if isinstance(value, dict) and "class_path" in value:
        options = ", ".join(f"{name} {shown(each)}" for name, each in value.get("init_args", {}).items())
        return f"{short_name(value)} ({options})" if options else short_name(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(each)}" for name, each in value.items())
    return json.dumps(value)
