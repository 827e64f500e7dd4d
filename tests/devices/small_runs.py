"""Small runs of the command line, and how what they have logged differs."""

import csv
from pathlib import Path

import yaml

CLOCKED = ("tokens_per_second", "minutes")
ALL = {  # of every run
    "seed_everything": 3,
    "trainer": {
        **{"max_steps": 20, "val_check_interval": 10, "log_every_n_steps": 1, "enable_progress_bar": False},
        "default_root_dir": "logs",
    },
    "model": {
        "width": 8,
        "schedule": {"class_path": "WarmupHoldCosine", "init_args": {"warmup_steps": 5, "decay_steps": 30}},
    },
}
SMALL = {"batch_size": 16, "validation_sequences": 14, "test_sequences": 14, "evaluation_batch_size": 5}
WORDS = {
    "class_path": "WordProblem",
    "init_args": {"group": "S3", "train_length": 9, "validation_lengths": [6], "test_lengths": [6, 8], **SMALL},
}
COPYING = {  # sequences whose letters are scored in the middle, in numbers that differ
    "class_path": "Copying",
    "init_args": {
        **{"train_length": 12, "shortest": 1, "longest": 5, "alphabet": 4, **SMALL},
        **{"validation_lengths": [3, 5], "test_lengths": [5, 9]},
    },
}


def _iterating(**options: object) -> dict:
    return {"class_path": "FixedPointMixer", "init_args": {"evaluation_iterations": 8, **options}}


GROWING = {
    "class_path": "ProgressiveLengths",
    "init_args": {"start": 2, "end": 9, "threshold": 0.15, "smoothing": 0.5},
}
WHOLE = {"class_path": "FixedLength", "init_args": {"length": 12}}
KINDS = {
    "implicit": {"data": WORDS, "model": {"mixer": _iterating(train_iterations=12), "curriculum": GROWING}},
    "one step, random caps": {
        "data": COPYING,
        "model": {
            "mixer": _iterating(train_iterations={"class_path": "RandomCap"}, gradient="OneStep"),
            **{"layers": 2, "curriculum": WHOLE},
        },
    },
    "copying": {"data": COPYING, "model": {"mixer": "LSTMMixer", "curriculum": WHOLE}},
    "last labels": {
        "data": {**WORDS, "init_args": {**WORDS["init_args"], "least_length": 2}},
        "model": {"mixer": "LSTMMixer", "labels": "last", "curriculum": GROWING},
    },
}


def fit(kind: str, folder: Path, *options: str) -> list[str]:
    """The arguments of a run, whose configuration is written into a folder."""
    arguments = ["fit"]
    for name, content in (("all", ALL), ("kind", KINDS[kind])):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        arguments += ["--config", str(folder / f"{name}.yaml")]
    return [*arguments, *options]


def table(folder: Path) -> dict[tuple[str, int], float]:
    """What a run has logged, but for what a clock says."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {(row["name"], int(row["step"])): float(row["value"]) for row in rows if not row["name"].endswith(CLOCKED)}


def difference(ours: Path, theirs: Path, *names: str) -> float:
    """The largest relative difference of what two runs have logged under any of the names, at the same steps."""
    ours, theirs = (
        {key: value for key, value in table(folder).items() if key[0].startswith(names)} for folder in (ours, theirs)
    )
    assert ours.keys() == theirs.keys() and ours
    return max(abs(ours[key] - theirs[key]) / max(abs(theirs[key]), 1e-6) for key in ours)
