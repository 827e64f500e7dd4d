"""The command line, run in this process on tiny models: messages, exit codes, configurations, checkpoints, folders."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from fprnn_lightning import cli
from fprnn_lightning.cli import CommandLine, main

SIZES = {"batch_size": 4, "train_length": 4, "validation_lengths": [4], "test_lengths": [4, 8]}
EVALUATION = {"validation_sequences": 8, "test_sequences": 8}
SMALL = {
    "data": {"class_path": "WordProblem", "init_args": {"group": "S3", **SIZES, **EVALUATION}},
    "model": {
        "mixer": {"class_path": "LSTMMixer", "init_args": {"expand": 1}},
        "width": 8,
        "curriculum": {"class_path": "ProgressiveLengths", "init_args": {"start": 2, "end": 4}},
        "schedule": {"class_path": "WarmupConstant", "init_args": {"warmup_steps": 1}},
    },
    "trainer": {"max_steps": 4, "val_check_interval": 2, "accelerator": "cpu", "enable_progress_bar": False},
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a tiny run, in an empty working folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(SMALL))
    return ["--config", str(config)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished fit."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    assert main(["fit", "--config", str(folder / "small.yaml"), "--trainer.default_root_dir", str(folder)]) == 0
    return folder / "s3" / "lstm" / "run_0"


def written() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], *parts: str) -> None:
    """Asserts that the arguments end in one sentence with these parts, exit code 2 and no trace on the disk."""
    before = written()
    assert main(arguments) == 2
    *_, sentence = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: ")
    assert len(sentence) < 400
    for part in parts:
        assert part in sentence
    assert written() == before


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--model.mixer", "DenseMixr"], ["model.mixer", "unknown class DenseMixr", "nearest known: DenseMixer"]),
        (["--model.mixer", "SequenceMixer"], ["model.mixer", "abstract", "DenseMixer"]),
        (["--model.mixer", "torch.nn.Linear"], ["model.mixer", "torch.nn.Linear is not a SequenceMixer", "LSTMMixer"]),
        (["--model.mixer", "nowhere.Mixer"], ["model.mixer", "cannot be imported", "nowhere"]),
        (["--model.mixer", "DenseMixer", "--model.mixer.core", "GatedDiagnal"], ["model.mixer.core", "GatedDiagonal"]),
        (["--model.curriculum", "Progresive"], ["model.curriculum", "nearest known: ProgressiveLengths"]),
        (["--model.schedule", "Cosine"], ["model.schedule", "unknown class Cosine", "WarmupCosine"]),
        (["--data", "WordProblm"], ["data", "unknown class WordProblm", "nearest known: WordProblem"]),
        (["--model.wdth", "8"], ["unknown option model.wdth", "nearest known: model.width"]),
        (["--model.widt", "8"], ["unknown option model.widt", "model.width"]),
        (["--model.mixer.expnd", "1"], ["model.mixer", "unknown option expnd", "nearest known: expand"]),
        (["--data.grup", "A5"], ["data", "unknown option grup", "nearest known: group"]),
        (["--trainr.max_steps", "8"], ["unknown option trainr.max_steps", "nearest known: trainer.max_steps"]),
        (["stray"], ["unexpected argument stray"]),
        (["--config", "absent.yaml"], ["absent.yaml", "not exist"]),
        (["--model.width", "wide"], ["model.width", "expected int, got wide"]),
        (["--model.mixer.expand", "wide"], ["model.mixer.expand", "expected float, got wide"]),
        (["--data.test_lengths", "[16, long]"], ["data.test_lengths", "expected int, got long"]),
        (["--trainer.precision", "low"], ["trainer.precision", "bf16-mixed", "got low"]),
        (["--model.width"], ["model.width", "expected one argument"]),
        (["--model.vocab_size", "8"], ["model.vocab_size", "data.vocab_size"]),
        (["--data.group", "Q9"], ["Q9"]),
        (["--data.train_length", "0"], ["train_length", "0"]),
        (["--data.workers", "null"], ["data.workers: expected int, got null"]),
        (["--data.test_lengths", "null"], ["data.test_lengths: expected Sequence, got null"]),
        (["--data.pairs", "null"], ["data.pairs: expected float, got null"]),
        (["--data.generators", "null"], ["data.generators: expected one of 'all', 'few', got null"]),
        (["--model.mixer", "null"], ["model.mixer: expected import path or a subclass spec, got null"]),
        (["--model.mixer", "FixedPointMixer", "--model.mixer.solver", "null"], ["expected a Solver, got null"]),
        (["--data", "CatBabi"], ["missing folder, give --data.folder"]),
        (["--model.learning_rate", "-1"], ["learning_rate", "-1"]),
        (["--data.test_lengths", "[0, 8]"], ["test_lengths", "0"]),
        (["--model.curriculum.start", "5"], ["ProgressiveLengths", "5", "4"]),
        (["--model.curriculum.end", "9"], ["model.curriculum ends at 9 tokens", "data.train_length", "4"]),
        (["--data", "Copying", "--data.train_length", "120"], ["FixedLength with length 120", "cannot be cut"]),
        (["--data", "ModularArithmeticWithBrackets"], ["model.curriculum", "FixedLength", "4", "cannot be cut"]),
        (["--model.mixer.expand", "0.3"], ["expand 0.3", "width 8"]),
        (["--model.layers", "0"], ["0 layers"]),
        (["--trainer.accelerator", "abacus"], ["trainer", "abacus"]),
        (["--trainer.default_root_dir", "../small.yaml"], ["trainer.default_root_dir", "../small.yaml/s3/lstm/run_0"]),
        (["--trainer.callbacks+", "StopWhenSolved", "--trainer.callbacks.threshold", "3"], ["StopWhenSolved", "3"]),
        (["--ckpt_path", "absent.ckpt"], ["ckpt_path", "absent.ckpt", "not exist"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) and value[0].startswith("--") else None,
)
def test_a_mistake_is_told_in_one_sentence(
    small: list[str], capsys: pytest.CaptureFixture[str], options: list[str], parts: list[str]
) -> None:
    refused(capsys, ["fit", *small, *options], *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: {wdth: 8}", ["unknown option model.wdth", "model.width"]),
        ("trainr: {max_steps: 8}", ["unknown option trainr.max_steps", "trainer.max_steps"]),
        ("model: {mixer: {class_path: LSTMMixr}}", ["model.mixer", "LSTMMixer", "mistaken.yaml"]),
        ("model: {mixer: {class_path: LSTMMixer, init_args: {expnd: 1}}}", ["model.mixer", "expand", "mistaken.yaml"]),
        ("data: {class_path: WordProblem, init_args: {grup: A5}}", ["data", "group", "mistaken.yaml"]),
        ("model: {width: wide}", ["model.width", "expected int, got wide", "mistaken.yaml"]),
        ("model: {width: '${model.wdth}'}", ["model.width", "model.wdth"]),
        ("model: [8", ["mistaken.yaml"]),
        ("only words", ["only words", "mistaken.yaml"]),
    ],
)
def test_a_mistake_in_a_config_is_told_in_one_sentence(
    small: list[str], capsys: pytest.CaptureFixture[str], text: str, parts: list[str]
) -> None:
    Path("mistaken.yaml").write_text(text)
    refused(capsys, ["fit", *small, "--config", "mistaken.yaml"], *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["ft"], ["unknown subcommand ft", "fit"]),
        (["--config", "a.yaml", "fit"], ["unknown subcommand --config"]),
        (["fit"], ["missing model.mixer and data", "--model.mixer"]),
        (["fit", "--data.group", "A5", "--data", "WordProblem"], ["data.group", "give --data", "first"]),
        (["data", "export", "--data", "WordProblem", "--data.pairs", "null", "--output", "a.csv"], ["got null"]),
        (["mixers", "all"], ["unexpected argument all"]),
        (["bench"], ["scan", "data"]),
        (["bench", "scn"], ["scn", "scan"]),
        (["bench", "data", "--outptu", "a.csv"], ["unknown option outptu", "nearest known: output"]),
    ],
)
def test_a_mistaken_subcommand_is_told_in_one_sentence(
    small: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    refused(capsys, arguments, *parts)


def test_a_process_ends_with_exit_code_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "fprnn_lightning", "fit", "--model.mixer", "LSTMMixr"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("error: model.mixer: unknown class LSTMMixr")
    assert "Traceback" not in ended.stderr


def test_a_bug_keeps_its_traceback(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, **options: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("fprnn_lightning.tasks.word_problem.WordProblem.__init__", broken)
    with pytest.raises(KeyError, match="a bug"):
        main(["fit", *small])


def test_a_loss_that_is_not_finite_is_told_in_one_sentence(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *small, "--model.learning_rate", "1e30", "--model.betas", "[0.0, 0.0]"]) == 2
    *_, sentence = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: the loss is nan at step")


def test_help_lists_all_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    listed = capsys.readouterr().out
    for name in ("fit", "validate", "test", "predict", "mixers", "tasks", "bench"):
        assert f"\n  {name} " in listed


def test_help_of_fit_explains_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help"])
    assert "--model.width" in capsys.readouterr().out


def test_mixers_and_tasks_are_listed_with_a_sentence_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mixers"]) == main(["tasks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert {"DenseMixer", "DiagonalMixer", "FixedPointMixer", "LSTMMixer", "WordProblem"} <= set(names)
    assert not {"SequenceMixer", "RecurrentMixer", "SequenceTask"} & set(names)
    assert all(line.endswith(".") and len(line.split()) > 3 for line in lines)


def test_bench_runs_its_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def data(output: Path | None = None) -> None:
        """Times nothing."""
        outputs.append(output)

    outputs = []
    monkeypatch.setattr(cli.bench, "data", data)
    assert main(["bench", "data"]) == main(["bench", "data", "--output", "a.csv"]) == 0
    assert [output and str(output) for output in outputs] == [None, "a.csv"]


def test_importing_is_light() -> None:
    check = (
        "import sys, fprnn_lightning; assert 'torch' not in sys.modules; "
        "import fprnn_lightning.cli; assert not {'numba', 'tensorboard'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_fit_leaves_its_folder_complete(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {"config.yaml", "best.ckpt", "last.ckpt", "length_curve.csv", "length_curve.png"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert not [path for path in trained.iterdir() if path.is_dir()]
    assert torch.load(trained / "last.ckpt", weights_only=True)["global_step"] == 4


def test_every_run_gets_the_next_folder_and_a_saved_config_repeats_the_run(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("run_0", "run_1"):
        saved = str(trained / "config.yaml")
        assert main(["fit", "--config", saved, "--trainer.default_root_dir", "root"]) == 0
        folder = Path("root", "s3", "lstm", run)
        weights, first = (torch.load(each / "last.ckpt")["state_dict"] for each in (folder, trained))
        assert all(torch.equal(weights[name], first[name]) for name in first)
        assert (folder / "length_curve.csv").read_text() == (trained / "length_curve.csv").read_text()
    assert [path.name for path in Path().iterdir()] == ["root"]


def test_later_configs_and_options_win(small: list[str]) -> None:
    Path("wider.yaml").write_text("model: {width: 12, layers: 2}\ntrainer: {max_steps: 1}\n")
    Path("other.yaml").write_text("model: {mixer: LSTMMixer, width: 16}\n")
    options = ["--model.layers", "1", "--model.mixer.expand", "2", "--trainer.default_root_dir", "root"]
    line = CommandLine(["fit", *small, "--config", "wider.yaml", "--config", "other.yaml", *options])
    assert line.model.hparams.width == 16
    assert line.model.hparams.layers == 1
    assert line.model.hparams.mixer["init_args"] == {"expand": 2.0}
    assert line.trainer.max_steps == 1


@pytest.mark.parametrize("subcommand", ["fit", "test"])
def test_interpolations_follow_every_override(small: list[str], subcommand: str) -> None:
    Path("tied.yaml").write_text(
        "model: {width: 4, layers: '${data.init_args.batch_size}'}\n"
        "data: {class_path: WordProblem, init_args: {batch_size: 3, evaluation_batch_size: '${model.width}'}}\n"
    )
    short = ["--trainer.default_root_dir", "root", "--trainer.max_steps", "1"]
    overrides = ["--model.width", "6", "--data.batch_size", "2"]
    line = CommandLine([subcommand, *small, *short, "--config", "tied.yaml", *overrides])
    assert line.datamodule.evaluation_batch_size == 6
    assert line.model.hparams.layers == 2


def test_a_model_without_checkpoint_is_said_to_be_untrained(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    CommandLine(["test", *small])
    assert "no --ckpt_path: test is of a model that has not been trained" in capsys.readouterr().err


def test_the_learner_takes_vocabulary_and_lengths_from_the_task(small: list[str]) -> None:
    line = CommandLine(["validate", *small, "--data.group", "Z7", "--data.validation_lengths", "[2, 3]"])
    assert line.model.hparams.vocab_size == 7
    assert line.model.validation_accuracy.lengths == [2, 3]


def test_a_checkpoint_brings_its_options_and_explicit_ones_beat_them(trained: Path, small: list[str]) -> None:
    checkpoint = ["--ckpt_path", str(trained / "last.ckpt")]
    sizes = ["--data.test_lengths", "[4]", "--data.test_sequences", "8", "--data.validation_sequences", "8"]
    data = ["--data", "WordProblem", "--data.group", "S3", *sizes]
    line = CommandLine(["test", *data, *checkpoint])
    assert line.model.hparams.width == 8
    assert line.model.hparams.mixer["init_args"] == {"expand": 1.0}
    short = ["--trainer.max_steps", "5", "--trainer.default_root_dir", "root"]
    line = CommandLine(["fit", *data, *short, "--model.learning_rate", "0.5", *checkpoint])
    assert line.model.learning_rate == 0.5
    assert line.model.hparams.width == 8
    Path("rate.yaml").write_text("model: {learning_rate: 0.25}\n")
    line = CommandLine(["validate", *data, "--config", "rate.yaml", *checkpoint])
    assert line.model.learning_rate == 0.25


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--model.width", "16"], ["model.embedding.weight", "(6, 8)", "(6, 16)"]),
        (["--data.group", "Z7"], ["model.embedding.weight", "(6, 8)", "(7, 8)"]),
        (["--model.layers", "2"], ["model.blocks.1", "absent"]),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(
    trained: Path, small: list[str], capsys: pytest.CaptureFixture[str], options: list[str], parts: list[str]
) -> None:
    for subcommand in ("fit", "test"):
        arguments = [subcommand, *small, *options, "--ckpt_path", str(trained / "last.ckpt")]
        refused(capsys, arguments, "another architecture", *parts)


@pytest.mark.parametrize("content", [b"", b"words", b"\x80\x02]q\x00."])
def test_a_file_that_is_no_checkpoint_is_refused(
    small: list[str], capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    Path("some.ckpt").write_bytes(content)
    refused(capsys, ["test", *small, "--ckpt_path", "some.ckpt"], "some.ckpt")


def test_a_resumed_fit_goes_on_as_if_never_stopped(trained: Path, small: list[str]) -> None:
    options = [*small, "--trainer.max_steps", "7", "--trainer.default_root_dir", "root"]
    assert main(["fit", *options, "--ckpt_path", str(trained / "last.ckpt")]) == 0
    assert main(["fit", *options]) == 0
    resumed, straight = (torch.load(f"root/s3/lstm/run_{n}/last.ckpt") for n in range(2))
    assert resumed["global_step"] == straight["global_step"] == 7
    assert resumed["curriculum"] == straight["curriculum"]
    for name, weight in straight["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], weight, rtol=0, atol=0)


def test_a_fit_that_its_schedule_ends_is_measured_too(small: list[str]) -> None:
    schedule = ["--model.schedule", "WarmupHoldCosine", "--model.schedule.warmup_steps", "1"]
    schedule += [
        "--model.schedule.decay_steps",
        "3",
        "--model.curriculum",
        "FixedLength",
        "--model.curriculum.length",
        "4",
    ]
    assert main(["fit", *small, *schedule, "--trainer.max_steps", "50", "--trainer.default_root_dir", "root"]) == 0
    folder = Path("root/s3/lstm/run_0")
    assert torch.load(folder / "last.ckpt")["global_step"] < 10
    assert (folder / "length_curve.csv").exists()


def test_what_is_done_with_a_checkpoint_goes_beside_it(trained: Path, small: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run_5"
    folder.mkdir()
    (folder / "best.ckpt").write_bytes((trained / "best.ckpt").read_bytes())
    arguments = ["--config", str(trained / "config.yaml"), "--ckpt_path", str(folder / "best.ckpt")]
    assert main(["validate", *arguments]) == main(["test", *arguments]) == main(["predict", *arguments]) == 0
    assert main(["test", *arguments]) == 0
    assert written() == []
    names = {path.name for path in folder.iterdir()}
    assert names == {"best.ckpt", "validate_0", "test_0", "test_1", "predict_0"}
    with (folder / "test_0" / "length_curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "length",
        "token_accuracy",
        "last_token_accuracy",
        "sequence_accuracy",
        "scaled_accuracy",
        "sequences",
    ]
    assert [row["length"] for row in rows] == ["4", "8", "50"]
    with (folder / "predict_0" / "predictions.csv").open() as file:
        header, *labels = csv.reader(file)
    assert header == [str(position) for position in range(1, 51)]
    assert len(labels) == 8
    assert {len(row) for row in labels} == {50}
    assert {label for row in labels for label in row} <= set("012345")


def test_without_a_logger_nothing_leaves_the_root(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *small, "--trainer.logger", "false", "--trainer.default_root_dir", "root"]) == 0
    assert "Length generalisation" in capsys.readouterr().out
    names = ["best.ckpt", "config.yaml", "last.ckpt", "length_curve.csv", "length_curve.png"]
    assert written() == [f"root/s3/lstm/run_0/{name}" for name in names]


def test_callbacks_of_a_config_are_added(small: list[str]) -> None:
    Path("more.yaml").write_text("trainer: {max_steps: 1, callbacks: [{class_path: StopWhenSolved}]}\n")
    line = CommandLine(["fit", *small, "--config", "more.yaml", "--trainer.default_root_dir", "root"])
    names = {type(callback).__name__ for callback in line.trainer.callbacks}
    assert {"StopWhenSolved", "LengthCurve", "NonFiniteGuard", "RunCheckpoint"} <= names
