"""Every configuration trains: the headline runs as they are, the parts put together."""

from pathlib import Path

import pytest

from fprnn_lightning.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"
HEADLINES = sorted(CONFIGS.glob("*.yaml"))
TASKS, MIXERS = sorted(CONFIGS.glob("task/*.yaml")), sorted(CONFIGS.glob("mixer/*.yaml"))
PAIRS = [(TASKS[0], mixer) for mixer in MIXERS] + [(task, MIXERS[0]) for task in TASKS[1:]]


@pytest.fixture(autouse=True)
def beside_published_files(published_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in that has the files which some configurations name."""
    monkeypatch.chdir(published_files)


def trains_two_steps(configs: list[Path], root: Path) -> None:
    options = {
        "trainer.default_root_dir": root,
        "trainer.accelerator": "cpu",
        "trainer.max_steps": 2,
        "trainer.val_check_interval": 2,
        "model.width": 16,
        "data.batch_size": 4,
        "data.validation_sequences": 4,
        "data.test_sequences": 4,
        "data.test_lengths": [16],
    }
    stacked = [argument for config in configs for argument in ("--config", str(config))]
    overrides = [f"--{name}={value}" for name, value in options.items()]
    assert main(["fit", *stacked, *overrides]) == 0
    (curve,) = root.rglob("length_curve.csv")
    assert curve.read_text().count("\n") > 2


@pytest.mark.parametrize("config", HEADLINES, ids=lambda path: path.stem)
def test_a_headline_config_trains(config: Path, tmp_path: Path) -> None:
    trains_two_steps([config], tmp_path)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " ".join(path.stem for path in pair))
def test_a_task_and_a_mixer_train_together(pair: tuple[Path, Path], tmp_path: Path) -> None:
    trains_two_steps(list(pair), tmp_path)


def test_there_are_configs_of_each_kind() -> None:
    assert CONFIGS / "quickstart.yaml" in HEADLINES
    assert TASKS
    assert MIXERS
