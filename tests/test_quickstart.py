"""The quickstart keeps its promise: A5 solved at length 16, and at 50 by training at 16; a diagonal mixer fails."""

import csv
from pathlib import Path

import pytest

from fprnn_lightning.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"


def curve(config: str, root: Path) -> dict[int, dict[str, float]]:
    assert main(["fit", "--config", str(CONFIGS / config), "--trainer.default_root_dir", str(root)]) == 0
    (path,) = root.rglob("length_curve.csv")
    with path.open() as file:
        return {int(row["length"]): {name: float(value) for name, value in row.items()} for row in csv.DictReader(file)}


@pytest.mark.slow
def test_the_quickstart_solves_a5_and_generalises(tmp_path: Path) -> None:
    accuracy = curve("quickstart.yaml", tmp_path)
    assert accuracy[16]["token_accuracy"] >= 0.999
    assert accuracy[50]["sequence_accuracy"] >= 0.95


@pytest.mark.slow
def test_a_diagonal_mixer_fails_under_the_same_budget(tmp_path: Path) -> None:
    assert curve("a5_diagonal.yaml", tmp_path)[16]["sequence_accuracy"] < 0.01
