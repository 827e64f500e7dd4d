"""Exported models: what is in the folder, that it is the checkpoint's model to the bit, and what is refused."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from safetensors.torch import load_file, save_file

import fprnn_lightning
from fprnn_lightning.cli import main
from fprnn_lightning.pretrained import read_export
from fprnn_lightning.tasks import WordProblem
from fprnn_lightning.training import SequenceLearner

SIZES = {"batch_size": 4, "train_length": 4, "validation_lengths": [4], "test_lengths": [4, 8]}
EVALUATION = {"validation_sequences": 8, "test_sequences": 8}
SMALL = {
    "data": {"class_path": "WordProblem", "init_args": {"group": "S3", **SIZES, **EVALUATION}},
    "model": {
        "mixer": {
            "class_path": "FixedPointMixer",
            "init_args": {"expand": 1, "convolution": 2, "train_iterations": {"class_path": "RandomCap"}},
        },
        "width": 8,
        "curriculum": {"class_path": "FixedLength", "init_args": {"length": 4}},
    },
    "trainer": {"max_steps": 3, "accelerator": "cpu", "enable_progress_bar": False},
}
TEXT = {
    "data": {"class_path": "Text", "init_args": {"files": "some.txt", **SIZES, **EVALUATION}},
    "model": {**SMALL["model"], "mixer": "LSTMMixer"},
}


def fitted(folder: Path, settings: dict) -> Path:
    (folder / "small.yaml").write_text(yaml.safe_dump(settings))
    assert main(["fit", "--config", str(folder / "small.yaml"), "--trainer.default_root_dir", str(folder)]) == 0
    (checkpoint,) = folder.rglob("last.ckpt")
    return checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a finished fit."""
    return fitted(tmp_path_factory.mktemp("trained"), SMALL)


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "new" / "s3"
    assert main(["export", "--ckpt_path", str(checkpoint), "--output", str(folder)]) == 0
    return folder


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    """An exported folder to spoil."""
    folder = tmp_path / "copied"
    folder.mkdir()
    for path in exported.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *parts: str) -> None:
    assert main(arguments) == 2
    *_, sentence = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: ")
    for part in parts:
        assert part in sentence


def test_the_folder_holds_weights_configuration_and_card(exported: Path) -> None:
    assert {path.name for path in exported.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert [path.name for path in exported.parent.iterdir()] == ["s3"], "nothing temporary is left"
    config = json.loads((exported / "config.json").read_text())
    assert (config["format"], config["format_version"], config["step"]) == ("fprnn_lightning", 1, 3)
    assert config["task"]["class_path"].endswith("WordProblem")
    assert config["task"]["init_args"]["group"] == "S3"
    assert config["versions"]["fprnn_lightning"] == fprnn_lightning.__version__
    card = (exported / "README.md").read_text()
    for part in (
        "# FixedPointMixer on WordProblem",
        'group "S3"',
        "| 50 |",
        "load_pretrained",
        "generate --pretrained",
    ):
        assert part in card


def test_the_python_of_the_card_runs(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (exported / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(exported.parent)
    names = {}
    exec(code, names)
    assert names["following"].shape == (1, 8)


def test_it_is_the_checkpoints_model_to_the_bit(checkpoint: Path, exported: Path) -> None:
    model = fprnn_lightning.load_pretrained(exported)
    original = SequenceLearner.load_from_checkpoint(checkpoint, weights_only=True, map_location="cpu").eval()
    assert not model.training
    torch.testing.assert_close(model.state_dict(), original.state_dict(), rtol=0, atol=0)
    tokens = torch.randint(0, 6, (3, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens), original(tokens))
    assert torch.equal(model.predict(tokens), original(tokens).argmax(-1))
    assert torch.equal(model.generate(tokens, 5), original.model.generate(tokens, 5))
    assert model.schedule == original.schedule


def test_a_trainer_tests_and_trains_it_further(exported: Path, small_trainer: Callable[..., Trainer]) -> None:
    model = fprnn_lightning.load_pretrained(exported)
    before = model.model.head.weight.clone()
    trainer = small_trainer(max_steps=1)
    task = WordProblem("S3", **SIZES, **EVALUATION)
    trainer.fit(model.train(), task)
    assert not torch.equal(model.model.head.weight, before)
    assert trainer.test(model, task, verbose=False)


def test_what_a_checkpoint_says_can_be_read(checkpoint: Path, exported: Path) -> None:
    saved, read = torch.load(checkpoint, weights_only=True), read_export(exported)
    torch.testing.assert_close(read["state_dict"], dict(saved["state_dict"]), rtol=0, atol=0)
    options = {name: value for name, value in saved["hyper_parameters"].items() if name[0] != "_"}
    assert read["hyper_parameters"] == json.loads(json.dumps(options))


def test_prompts_are_continued(
    exported: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fprnn_lightning.load_pretrained(exported)
    capsys.readouterr()
    expected = [
        " ".join(map(str, model.generate(torch.tensor([prompt]), 3)[0].tolist())) for prompt in ([0, 1, 2], [5])
    ]
    generate = ["generate", "--pretrained", str(exported), "--length", "3"]
    assert main([*generate, "--prompt", "0 1 2"]) == 0
    assert capsys.readouterr().out.splitlines() == expected[:1]
    assert main([*generate, "--prompt", '["0 1 2", "5"]']) == 0
    assert capsys.readouterr().out.splitlines() == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("0 1 2\n5\n"))
    assert main(generate) == 0
    assert capsys.readouterr().out.splitlines() == expected


def test_prompts_of_text_are_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text("Once upon a time.\n" * 100)
    checkpoint = fitted(tmp_path, SMALL | TEXT)
    Path("some.txt").unlink()  # no data is needed to use a model
    assert main(["export", "--ckpt_path", str(checkpoint), "--output", "exported"]) == 0
    assert '--prompt "Once"' in Path("exported", "README.md").read_text()
    capsys.readouterr()
    assert main(["generate", "--pretrained", "exported", "--length", "4", "--prompt", "Öl"]) == 0
    model = fprnn_lightning.load_pretrained("exported")
    expected = bytes(model.generate(torch.tensor([list("Öl".encode())]), 4)[0].tolist())
    assert capsys.readouterr().out == expected.decode("utf-8", "replace") + "\n"


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--prompt", ""], ["prompt", "empty"]),
        (["--prompt", "0 6"], ["prompt", "6 is no token", "0 to 5"]),
        (["--prompt", "0 x"], ["prompt", "'x'", "number"]),
        (["--prompt", "0", "--length", "0"], ["length", "0"]),
        (["--prompt", "0", "--pretrained", "absent"], ["absent", "not exist"]),
    ],
)
def test_a_mistaken_prompt_is_refused(
    exported: Path, capsys: pytest.CaptureFixture[str], options: list[str], parts: list[str]
) -> None:
    refused(capsys, ["generate", "--pretrained", str(exported), *options], *parts)


def spoil_format(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"format_version": 2}))


def spoil_kind(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["Other"]}')


def spoil_mixer(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("FixedPointMixer", "FixedMixer"))


def spoil_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model"]["width"] = 12
    (folder / "config.json").write_text(json.dumps(config))


def spoil_names(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.head.bias"]
    save_file(weights, folder / "model.safetensors")


def spoil_end(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda folder: (folder / "config.json").unlink(), ["has no config.json"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["has no model.safetensors"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json is not JSON"]),
        (spoil_format, ["config.json is of format 2", "up to 1"]),
        (spoil_kind, ["config.json is not of fprnn_lightning"]),
        (spoil_mixer, ["config.json", "FixedMixer"]),
        (spoil_width, ["model.embedding.weight is (6, 8) in it and (6, 12) in the model"]),
        (spoil_names, ["model.head.bias is absent in it and (6,) in the model"]),
        (spoil_end, ["model.safetensors is not a whole file"]),
    ],
)
def test_a_spoilt_folder_is_refused(
    copied: Path, capsys: pytest.CaptureFixture[str], spoil: object, parts: list[str]
) -> None:
    spoil(copied)
    with pytest.raises(ValueError) as raised:
        fprnn_lightning.load_pretrained(copied)
    for part in parts:
        assert part in str(raised.value)
    refused(capsys, ["generate", "--pretrained", str(copied), "--prompt", "0"], *parts)


def test_an_absent_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="folder absent does not exist"):
        fprnn_lightning.load_pretrained("absent")


def test_a_folder_that_holds_something_stays_as_it_is(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for name in ("full", "full/mine"):
        refused(capsys, ["export", "--ckpt_path", str(checkpoint), "--output", str(tmp_path / name)], "exists already")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    assert main(["export", "--ckpt_path", str(checkpoint), "--output", str(tmp_path / "empty")]) == 0
    assert len(list((tmp_path / "empty").iterdir())) == 3


def test_a_checkpoint_that_cannot_be_exported_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half, bare, python = (tmp_path / name for name in ("half.ckpt", "bare.ckpt", "python.ckpt"))
    half.write_bytes(checkpoint.read_bytes()[: checkpoint.stat().st_size // 2])
    saved = torch.load(checkpoint, weights_only=True)
    del saved["hyper_parameters"]["mixer"]
    torch.save(saved, python)
    del saved["hyper_parameters"]
    torch.save(saved, bare)
    expected = {tmp_path / "absent.ckpt": "does not exist", half: "not a checkpoint", bare: "hyper_parameters"}
    for path, part in (expected | {python: "mixer"}).items():
        refused(capsys, ["export", "--ckpt_path", str(path), "--output", str(tmp_path / "out")], path.name, part)
    assert {path.name for path in tmp_path.iterdir()} == {"half.ckpt", "bare.ckpt", "python.ckpt"}


def test_without_the_runs_configuration_the_task_is_not_known(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    del saved["hyper_parameters"]["unit"]  # as written before there was such an option
    torch.save(saved, tmp_path / "alone.ckpt")
    assert main(["export", "--ckpt_path", str(tmp_path / "alone.ckpt"), "--output", str(tmp_path / "out")]) == 0
    assert "task is not known" in capsys.readouterr().out
    assert main(["generate", "--pretrained", str(tmp_path / "out"), "--prompt", "1 2"]) == 0
    assert "## Accuracies" not in (tmp_path / "out" / "README.md").read_text()


def test_accuracies_are_said_to_be_of_the_last_weights(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("last.ckpt", "length_curve.csv"):
        (tmp_path / name.replace("last", "best")).write_bytes((checkpoint.parent / name).read_bytes())
    assert main(["export", "--ckpt_path", str(tmp_path / "best.ckpt"), "--output", str(tmp_path / "out")]) == 0
    assert "need not be these" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("subcommand", ["test", "validate", "predict"])
def test_an_exported_folder_stands_for_its_checkpoint(checkpoint: Path, copied: Path, subcommand: str) -> None:
    config = ["--config", str(checkpoint.parent / "config.yaml")]
    for path in (checkpoint, copied):
        assert main([subcommand, *config, "--ckpt_path", str(path)]) == 0
    written = {"test": "length_curve.csv", "validate": "metrics.csv", "predict": "predictions.csv"}[subcommand]
    ours, theirs = (folder / f"{subcommand}_0" / written for folder in (copied, checkpoint.parent))
    without_step = [line.partition(",")[2] for line in ours.read_text().splitlines()]
    assert without_step == [line.partition(",")[2] for line in theirs.read_text().splitlines()]


def test_training_goes_on_from_an_exported_folder(checkpoint: Path, copied: Path, tmp_path: Path) -> None:
    config = ["--config", str(checkpoint.parent / "config.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    assert main(["fit", *config, "--trainer.max_steps=1", "--model.learning_rate=0", f"--ckpt_path={copied}"]) == 0
    (last,) = tmp_path.rglob("last.ckpt")
    trained, exported = torch.load(last, weights_only=True)["state_dict"], read_export(copied)["state_dict"]
    assert all(torch.equal(trained[name], exported[name]) for name in exported if "draws" not in name)


def test_a_folder_that_is_no_export_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(checkpoint.parent / "config.yaml")]
    refused(capsys, ["test", *config, "--ckpt_path", str(tmp_path)], f"ckpt_path: {tmp_path} has no config.json")


COMMAND = {"class_path": "os.system", "init_args": {"command": "touch run"}}


def test_what_an_exported_folder_names_is_not_run(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.loads((copied / "config.json").read_text())
    config["model"]["mixer"] = COMMAND
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"os\.system is not a class of fprnn_lightning"):
        fprnn_lightning.load_pretrained(copied)
    config["task"] = COMMAND
    (copied / "config.json").write_text(json.dumps(config))
    refused(capsys, ["generate", "--pretrained", str(copied), "--prompt", "1"], "os.system is not a class")
    assert not Path("run").exists()


def test_what_a_checkpoint_names_is_not_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = torch.load(checkpoint, weights_only=True)
    content["hyper_parameters"]["mixer"] = COMMAND
    torch.save(content, "evil.ckpt")
    config = ["--config", str(checkpoint.parent / "config.yaml")]
    refused(capsys, ["test", *config, "--ckpt_path", "evil.ckpt"], "evil.ckpt", "os.system is not a class")
    refused(capsys, ["export", "--ckpt_path", "evil.ckpt", "--output", "out"], "os.system is not a class")
    assert not Path("run").exists()
    assert not Path("out").exists()
