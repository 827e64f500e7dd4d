"""Every configuration trains: the headline runs as they are, the parts put together."""

from functools import partialmethod
from pathlib import Path

import pytest
import yaml
from torch import nn

from fprnn_lightning.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"
EXTRAS = sorted(CONFIGS.glob("extra/*.yaml"))
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


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda path: path.stem)
def test_an_extra_part_goes_on_top_of_a_run(
    extra: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))  # needs no C++
    trains_two_steps([CONFIGS / "a5_diagonal.yaml", extra], tmp_path)
    (folder,) = tmp_path.glob("a5/diagonal/run_0")
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    names = {path.name for path in folder.iterdir()}
    assert ("last.ckpt" in names) == (extra.stem != "debug")
    shown = capsys.readouterr().out
    match extra.stem:
        case "debug":
            assert settings["trainer"]["detect_anomaly"]
        case "profile":
            assert {"fit-profile.txt", "test-profile.txt"} <= names
            assert f"where the time went: {folder / 'fit-profile.txt'}" in shown
        case "bf16":
            assert settings["trainer"]["precision"] == "bf16-mixed"
        case "compile":
            assert settings["model"]["compile"]
        case "find_learning_rate":
            assert "learning_rate.png" in names
            assert "learning rate" in shown
        case "stop_when_solved":
            assert settings["trainer"]["callbacks"][0]["class_path"].endswith("StopWhenSolved")
        case _:
            pytest.fail("this part's effect is not tested")


def test_extra_parts_stack(tmp_path: Path) -> None:
    parts = [CONFIGS / "extra" / f"{name}.yaml" for name in ("find_learning_rate", "stop_when_solved", "debug", "bf16")]
    trains_two_steps([CONFIGS / "a5_diagonal.yaml", *parts], tmp_path)
    settings = yaml.safe_load(next(tmp_path.rglob("config.yaml")).read_text())
    callbacks = [each["class_path"].rpartition(".")[2] for each in settings["trainer"]["callbacks"]]
    assert callbacks == ["FindLearningRate", "StopWhenSolved"]
    assert settings["trainer"]["precision"] == "bf16-mixed"


def test_there_are_configs_of_each_kind() -> None:
    assert CONFIGS / "quickstart.yaml" in HEADLINES
    assert TASKS
    assert MIXERS
    assert EXTRAS
