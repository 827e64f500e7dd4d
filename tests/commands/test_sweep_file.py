"""A sweep's file: the runs it makes, their names and arguments, and its mistakes."""

from pathlib import Path

import pytest

from fprnn_lightning.cli import FitCheck
from fprnn_lightning.commands.sweep_file import read_sweep
from fprnn_lightning.sentences import UsageError

REPOSITORY = Path(__file__).parents[2]
SWEEPS = sorted(REPOSITORY.glob("configs/sweep/*.yaml"))


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("task", "dense", "lstm"):
        Path(f"{name}.yaml").write_text("")


def runs(text):
    Path("some.yaml").write_text(text)
    return {run.name: run.arguments for run in read_sweep(Path("some.yaml"))}


def test_a_grid_is_all_combinations_of_named_and_plain_values():
    made = runs("""
        config: task.yaml
        options: {trainer: {max_steps: 3}, model.width: 8}
        grid:
          mixer:
            dense: {config: dense.yaml}
            wide: {config: [dense.yaml, lstm.yaml], model.width: 16}
          seed: [0, 1]
    """)
    common = ("--config=task.yaml", "--config=dense.yaml")
    seeds = [(f"--seed_everything={seed}", f"--data.seed={seed}") for seed in (0, 1)]
    narrow, wide = ("--trainer.max_steps=3", "--model.width=8"), ("--trainer.max_steps=3", "--model.width=16")
    assert made == {
        "dense-seed_0": (*common, *narrow, *seeds[0]),
        "dense-seed_1": (*common, *narrow, *seeds[1]),
        "wide-seed_0": (*common, "--config=lstm.yaml", *wide, *seeds[0]),
        "wide-seed_1": (*common, "--config=lstm.yaml", *wide, *seeds[1]),
    }


def test_values_name_their_runs():
    made = runs("""
        grid:
          config: [dense.yaml, [dense.yaml, lstm.yaml]]
          model.mixer.gradient: [OneStep, {class_path: a.Implicit, init_args: {iterations: 4}}]
          data.test_lengths: [[4, 8], null]
    """)
    assert list(made)[:4] == [
        "dense-gradient_OneStep-test_lengths_4_8",
        "dense-gradient_OneStep-test_lengths_null",
        "dense-gradient_Implicit_4-test_lengths_4_8",
        "dense-gradient_Implicit_4-test_lengths_null",
    ]
    assert list(made)[4].startswith("dense+lstm-")
    implicit = '--model.mixer.gradient={"class_path": "a.Implicit", "init_args": {"iterations": 4}}'
    assert made["dense-gradient_Implicit_4-test_lengths_null"][1:] == (implicit, "--data.test_lengths=null")
    assert made["dense-gradient_OneStep-test_lengths_4_8"][2] == "--data.test_lengths=[4, 8]"


def test_single_runs_are_named_and_come_after_the_grid():
    made = runs("config: task.yaml\ngrid: {seed: [0]}\nruns: {lstm: {config: lstm.yaml, seed: 7}}")
    assert list(made) == ["seed_0", "lstm"]
    assert made["lstm"] == ("--config=task.yaml", "--config=lstm.yaml", "--seed_everything=7", "--data.seed=7")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("grid: [", "some.yaml: is not YAML"),
        ("only words", "some.yaml: the file: expected keys with values"),
        ("grd: {seed: [0]}", "some.yaml: unknown key grd, nearest known: grid"),
        ("config: task.yaml", "names no run"),
        ("grid: {seed: 0}", "grid: seed: expected a list of values, or names with their options, got 0"),
        ("grid: {seed: []}", "grid: seed: expected a list"),
        ("grid: {mixer: {dense: dense.yaml}}", "grid: mixer: dense: expected keys with values"),
        ("grid: {config: [absent.yaml]}", "config: file absent.yaml does not exist"),
        ("config: {a: b}\ngrid: {seed: [0]}", "config: expected a file or a list of files"),
        ("options: {trainer.default_root_dir: a}\ngrid: {seed: [0]}", "set by the sweep, see its --root"),
        ("grid: {model.width: [8, 8]}", "two runs are called width_8"),
        ("grid: {mixer: {a: {model.width: 8}, b: {model.width: 8}}}", "runs a and b are the same"),
        ("runs: {../wide: {model.width: 8}}", "runs: ../wide cannot be a folder's name here"),
        ("runs: {state.yaml: {model.width: 8}}", "runs: state.yaml cannot be a folder's name here"),
        ("grid: {a.rank: [1, 2], b.rank: [1, 2]}\nruns: {rank_1-rank_2: {model.width: 8}}", "two runs are called"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(text, sentence):
    with pytest.raises(UsageError) as error:
        runs(text)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda path: path.stem)
def test_every_run_of_every_sweep_is_a_fit(sweep, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    check = FitCheck()
    made = read_sweep(sweep)
    for run in made:
        check(list(run.arguments))
    assert f"{len(made)} runs" in sweep.read_text()


def test_there_are_sweeps():
    assert len(SWEEPS) >= 4


def test_dependences_of_the_paper_are_what_they_are_called(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    check = FitCheck()
    seen = {}
    for run in read_sweep(Path("configs/sweep/copying_dependence.yaml")):
        check(list(run.arguments))
        dependence = check.fit.model.model.blocks[0].mixer.dependence
        letters = {"b": dependence.input, "c": dependence.output, "Q": dependence.channel_mixer}
        seen[run.name.partition("-")[0]] = {name for name, sees in (letters | {"λ": dependence.decay}).items() if sees}
    assert seen == {
        "nothing": set(),
        "b_c": {"b", "c"},
        "b_c_Q": {"b", "c", "Q"},
        "b_c_decay": {"b", "c", "λ"},
        "all": {"b", "c", "Q", "λ"},
    }
