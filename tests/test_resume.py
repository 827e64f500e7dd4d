"""A run that is killed, told to end or refused by the disk loses nothing that was saved, and resumed it is the one that
was never stopped, to the bit: weights, optimiser, curriculum, random states, and all that it logged.
"""

import csv
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fprnn_lightning.callbacks.stop_on_signal import SIGNALS
from fprnn_lightning.cli import main
from fprnn_lightning.training import SequenceLearner, checkpoint_file, read_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:layer 0. .* have not converged")

DATA = {
    "class_path": "WordProblem",
    "init_args": {
        **{"group": "S3", "batch_size": 8, "train_length": 6, "validation_lengths": [6], "test_lengths": [6, 8]},
        **{"validation_sequences": 8, "test_sequences": 8},
    },
}
ITERATING = {
    "class_path": "FixedPointMixer",
    "init_args": {"train_iterations": {"class_path": "RandomCap"}, "evaluation_iterations": 8},
}
RUN = {
    "seed_everything": 3,
    "data": DATA,
    "model": {
        "mixer": "DenseMixer",
        "width": 8,
        "curriculum": {"class_path": "ProgressiveLengths", "init_args": {"start": 1, "end": 6, "threshold": 0.3}},
        "schedule": {"class_path": "WarmupHoldCosine", "init_args": {"warmup_steps": 5, "decay_steps": 30}},
    },
    "trainer": {
        **{"max_steps": 60, "val_check_interval": 10, "log_every_n_steps": 1, "accelerator": "cpu"},
        "enable_progress_bar": False,
    },
}
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["fprnn_lightning.cli"])
UNREPEATABLE = ("tokens_per_second", "minutes")  # what a clock says


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of a short run in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump(RUN))
    return ["--config", "run.yaml"]


def start(arguments: list[str], before: object = None) -> BaseProcess:
    """A process that runs the command line, after `before`; its output is dropped."""
    process = PROCESSES.Process(target=_run, args=(arguments, before, os.getcwd()))
    process.start()
    return process


def ran(arguments: list[str]) -> int:
    """The exit code of the command line in a process like those that are killed, as its bits are to be the same."""
    process = start(arguments)
    process.join()
    return process.exitcode


def _run(arguments: list[str], before: object, folder: str) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    with open("output.log", "a") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        if before:
            before()
        sys.exit(main(arguments))


def wait_until(condition: object, process: BaseProcess) -> None:
    deadline = monotonic() + 120
    while not condition():
        assert process.is_alive(), Path("output.log").read_text()[-2000:]
        assert monotonic() < deadline
        sleep(0.002)


def steps_logged(folder: Path) -> int:
    if not (folder / "metrics.csv").exists():
        return 0
    return sum(",train/loss," in line for line in (folder / "metrics.csv").read_text().splitlines())


def history(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars of the event files in a folder, but for what a clock says.

    Points of the length curve count once: a run killed as it wrote them, before length_curve.csv, writes them again,
    and their steps are lengths, before those from which a resumed run voids what is there.
    """
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    names = [name for name in events.Tags()["scalars"] if not name.endswith(UNREPEATABLE)]
    points = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
    return {
        name: list(dict.fromkeys(curve)) if name.startswith("length_curve/") else curve
        for name, curve in points.items()
    }


def table(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open() as file:
        return sorted(row for row in csv.reader(file) if not row[1].endswith(UNREPEATABLE))


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def assert_same_run(resumed: Path, straight: Path) -> None:
    """Two folders hold the same run: last checkpoint, events and tables."""
    ours, theirs = (torch.load(folder / "last.ckpt", weights_only=True) for folder in (resumed, straight))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "curriculum", "random_states", "global_step"):
        assert same(ours[part], theirs[part]), part
    assert same(ours["loops"]["fit_loop"], theirs["loops"]["fit_loop"])
    best, straight_best = (torch.load(folder / "best.ckpt", weights_only=True) for folder in (resumed, straight))
    assert best["global_step"] == straight_best["global_step"]
    assert same(best["state_dict"], straight_best["state_dict"])
    assert history(resumed) == history(straight)
    assert table(resumed) == table(straight)
    assert (resumed / "length_curve.csv").read_text() == (straight / "length_curve.csv").read_text()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mixer", ["dense", "fixed_point"])
def test_a_resumed_run_is_the_uninterrupted_one(run: list[str], mixer: str, workers: int) -> None:
    if mixer == "fixed_point":
        Path("iterating.yaml").write_text(yaml.safe_dump({"model": {"mixer": ITERATING}}))
        run += ["--config", "iterating.yaml"]
    run += [f"--data.workers={workers}"]
    assert ran(["fit", *run, "--trainer.default_root_dir=straight"]) == 0
    again = ["fit", *run, "--trainer.default_root_dir=stopped", "--resume=auto"]
    folder = Path("stopped/s3", mixer, "run_0")
    for step, number in ((13, signal.SIGTERM), (27, signal.SIGKILL), (45, signal.SIGUSR1)):
        process = start(again)
        wait_until(lambda step=step: steps_logged(folder) >= step, process)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == (-9 if number == signal.SIGKILL else 128 + number)
    assert ran(again) == 0
    assert_same_run(folder, Path("straight/s3", mixer, "run_0"))


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_run_loses_nothing_that_was_saved(run: list[str], times: int) -> None:
    started = monotonic()
    straight = start(["fit", *run, "--trainer.default_root_dir=straight"])
    straight.join()
    duration = monotonic() - started
    moments, kills, rounds = random.Random(7), 0, 0
    while kills < times:
        folder = Path(f"killed_{rounds}/s3/dense/run_0")
        arguments = ["fit", *run, f"--trainer.default_root_dir=killed_{rounds}", "--resume=auto"]
        saved, finished = 0, False
        while not finished:
            process = start(arguments)
            process.join(moments.uniform(0.2, 1.0) * duration if kills < times else None)
            finished = process.exitcode == 0
            if not finished:
                assert process.exitcode is None, Path("output.log").read_text()[-2000:]
                process.kill()
                process.join()
                kills += 1
            if (folder / "last.ckpt").exists():
                before, saved = saved, read_checkpoint(folder / "last.ckpt")["global_step"]
                assert saved >= before
            assert steps_logged(folder) <= saved + RUN["trainer"]["val_check_interval"]
        assert_same_run(folder, Path("straight/s3/dense/run_0"))
        rounds += 1


def write_slowly() -> None:
    """Makes the next checkpoints take forever half-way through."""
    save = checkpoint_file._save

    def half(checkpoint: dict, path: Path) -> None:
        save(checkpoint, path)
        if checkpoint["global_step"] > 10:
            os.truncate(path, path.stat().st_size // 2)
            Path("writing").touch()
            sleep(600)

    checkpoint_file._save = half


def test_killed_while_it_writes_a_checkpoint_a_run_has_the_one_before(run: list[str]) -> None:
    folder = Path("killed/s3/dense/run_0")
    arguments = ["fit", *run, "--trainer.default_root_dir=killed", "--resume=auto"]
    process = start(arguments, write_slowly)
    wait_until(Path("writing").exists, process)
    process.kill()
    process.join()
    assert list(folder.glob(".*.partial"))
    assert {read_checkpoint(folder / name)["global_step"] for name in ("best.ckpt", "last.ckpt")} == {10}
    assert ran(arguments) == ran(["fit", *run, "--trainer.default_root_dir=straight"]) == 0
    assert not list(folder.glob(".*.partial"))
    assert_same_run(folder, Path("straight/s3/dense/run_0"))


def test_within_an_accumulated_step_nothing_is_saved(run: list[str]) -> None:
    run += ["--trainer.accumulate_grad_batches=4", "--data.batch_size=8"]
    folder = Path("killed/s3/dense/run_0")
    again = ["fit", *run, "--trainer.default_root_dir=killed", "--resume=auto"]
    for step, number in ((13, signal.SIGKILL), (26, signal.SIGTERM)):
        process = start(again)
        wait_until(lambda step=step: steps_logged(folder) >= step, process)
        os.kill(process.pid, number)
        process.join()
    assert ran(again) == ran(["fit", *run, "--trainer.default_root_dir=straight"]) == 0
    assert_same_run(folder, Path("straight/s3/dense/run_0"))


def test_a_run_that_was_moved_remembers_its_best(run: list[str]) -> None:
    run += ["--model.learning_rate=0.3"]  # which soon makes it worse
    process = start(["fit", *run, "--trainer.default_root_dir=before"])
    wait_until(lambda: steps_logged(Path("before/s3/dense/run_0")) > 42, process)
    process.terminate()
    process.join()
    Path("before").rename("after")
    assert ran(["fit", *run, "--trainer.default_root_dir=after", "--resume=auto"]) == 0
    assert ran(["fit", *run, "--trainer.default_root_dir=straight"]) == 0
    assert read_checkpoint("straight/s3/dense/run_0/best.ckpt")["global_step"] < 50
    assert_same_run(Path("after/s3/dense/run_0"), Path("straight/s3/dense/run_0"))


def test_a_run_is_not_continued_as_another(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("root/s3/dense/run_0")
    process = start(["fit", *run, "--trainer.default_root_dir=root"])
    wait_until((folder / "last.ckpt").exists, process)
    process.terminate()
    process.join()
    before = (folder / "config.yaml").read_text()
    assert main(["fit", "--resume", str(folder), "--model.learning_rate=0.5", "--data.batch_size=4"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "run_0 has another data.batch_size and model.learning_rate, leave that as it is" in said
    assert (folder / "config.yaml").read_text() == before
    assert main(["fit", *run, "--trainer.default_root_dir=root", "--resume=auto", "--trainer.max_steps=5"]) == 0
    assert "run_0 differs in trainer.max_steps" in capsys.readouterr().out
    assert (folder.parent / "run_1").exists()
    assert main(["fit", "--resume", str(folder), "--trainer.max_steps=70"]) == 0
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == 70


def test_what_a_run_started_from_may_be_gone_when_it_is_resumed(
    run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *run, "--trainer.default_root_dir=first", "--trainer.max_steps=10"]) == 0
    Path("first/s3/dense/run_0/last.ckpt").rename("origin.ckpt")
    run += ["--trainer.default_root_dir=root", "--ckpt_path=origin.ckpt"]
    process = start(["fit", *run])
    wait_until(Path("root/s3/dense/run_0/last.ckpt").exists, process)
    process.terminate()
    process.join()
    Path("origin.ckpt").unlink()
    assert main(["fit", *run, "--resume=auto", "--seed_everything=9"]) == 2
    assert "ckpt_path: file origin.ckpt does not exist" in capsys.readouterr().err
    assert main(["fit", *run, "--resume=auto"]) == 0
    assert [path.name for path in Path("root/s3/dense").iterdir()] == ["run_0"]
    assert main(["fit", *run, "--resume=auto", "--ckpt_path=best"]) == 2
    assert "ckpt_path best is of another run each time" in capsys.readouterr().err


def test_a_run_that_went_on_from_an_end_logs_the_same_steps(run: list[str]) -> None:
    short = ["fit", *run, "--trainer.max_steps=20", "--trainer.default_root_dir=first"]
    assert main(short) == 0
    for name in ("best", "last"):
        path = f"first/s3/dense/run_0/{name}.ckpt"
        assert main(["fit", *run, f"--trainer.default_root_dir={name}", f"--ckpt_path={path}"]) == 0
        steps = [step for step, _ in history(Path(f"{name}/s3/dense/run_0"))["train/loss"]]
        assert steps == list(range(read_checkpoint(path)["global_step"], 60))


def test_with_another_logger_a_run_ends_too(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run += ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=elsewhere", "--trainer.max_steps=5"]
    arguments = ["fit", *run, "--resume=auto", "--trainer.default_root_dir=root"]
    assert main(arguments) == main(arguments) == 0
    assert "run_0 is finished" in capsys.readouterr().out


def test_checkpoints_of_a_configuration_come_on_top(run: list[str]) -> None:
    more = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "validation/loss", "save_top_k": 2}}
    Path("more.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [more], "max_steps": 10}}))
    assert main(["fit", *run, "--config=more.yaml", "--trainer.default_root_dir=root"]) == 0
    assert len(list(Path("root/s3/dense/run_0").rglob("*.ckpt"))) == 3


@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_what_only_measures_promises_nothing_when_it_is_ended(run: list[str], subcommand: str) -> None:
    short = [*run, "--trainer.default_root_dir=root", "--trainer.max_steps=5"]
    assert main(["fit", *short]) == 0
    process = start([subcommand, *short, "--ckpt_path=root/s3/dense/run_0/last.ckpt"], patiently)
    wait_until(Path("begun").exists, process)
    process.terminate()
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    assert Path("output.log").read_text().splitlines()[-1] == "ended by SIGTERM"
    assert not list(Path("root/s3/dense/run_0").glob("*_0/*.csv"))


def patiently() -> None:
    """Makes measuring take long enough to be ended."""

    def start(self: object, *_: object) -> None:
        Path("begun").touch()
        sleep(1)

    for name in ("validation", "test", "predict"):
        setattr(SequenceLearner, f"on_{name}_epoch_start", start)


@pytest.mark.parametrize(
    ("hook", "steps"), [("configure_model", 1), ("on_fit_end", 60)], ids=["in the set-up", "between training and test"]
)
def test_a_signal_counts_before_training_and_after_it(run: list[str], hook: str, steps: int) -> None:
    arguments = ["fit", *run, "--trainer.default_root_dir=root", "--resume=auto"]
    process = start(arguments, partial(linger, hook))
    wait_until(Path("lingering").exists, process)
    os.kill(process.pid, signal.SIGUSR1)
    process.join()
    said = Path("output.log").read_text()
    assert process.exitcode == 128 + signal.SIGUSR1, said[-2000:]
    folder = Path("root/s3/dense/run_0")
    assert said.splitlines()[-1].startswith(f"ended by SIGUSR1 after step {steps}, saved in {folder}/last.ckpt;")
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == steps
    assert ran(arguments) == ran(["fit", *run, "--trainer.default_root_dir=straight"]) == 0
    assert_same_run(folder, Path("straight/s3/dense/run_0"))


def linger(hook: str) -> None:
    """Makes a hook of the module take a while, once."""
    before = getattr(SequenceLearner, hook)

    def slow(self: SequenceLearner) -> None:
        before(self)
        if not Path("lingering").exists():
            Path("lingering").touch()
            sleep(1)

    setattr(SequenceLearner, hook, slow)


def test_signals_do_what_they_did_when_a_run_is_over(run: list[str]) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    assert main(["fit", *run, "--trainer.default_root_dir=root", "--trainer.max_steps=5"]) == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before


SOLVED = {"class_path": "StopWhenSolved", "init_args": {"threshold": 0.001}}


@pytest.mark.parametrize(
    "course",
    [
        {"model": {"schedule": {"class_path": "WarmupCosine", "init_args": {"warmup_steps": 5, "total_steps": 24}}}},
        {"trainer": {"callbacks": [SOLVED]}},
        {"trainer": {"max_steps": 20}},
    ],
    ids=["by its schedule", "when solved", "by its last step"],
)
def test_a_run_killed_between_its_end_and_its_test_is_tested(run: list[str], course: dict) -> None:
    Path("course.yaml").write_text(yaml.safe_dump(course))
    run += ["--config", "course.yaml"]
    folder = Path("killed/s3/dense/run_0")
    process = start(["fit", *run, "--trainer.default_root_dir=killed"], forever)
    wait_until(Path("testing").exists, process)
    process.kill()
    process.join()
    ended = read_checkpoint(folder / "last.ckpt")
    assert not (folder / "length_curve.csv").exists()
    assert ran(["fit", "--resume", str(folder)]) == ran(["fit", *run, "--trainer.default_root_dir=straight"]) == 0
    assert read_checkpoint(folder / "last.ckpt")["global_step"] == ended["global_step"]
    assert_same_run(folder, Path("straight/s3/dense/run_0"))


def forever() -> None:
    """Makes tests take forever."""

    def start(self: object, *_: object) -> None:
        Path("testing").touch()
        sleep(600)

    SequenceLearner.on_test_epoch_start = start


def test_a_finished_run_is_left_alone(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", *run, "--trainer.default_root_dir=root", "--resume=auto", "--trainer.max_steps=10"]
    assert main(arguments) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("root").rglob("*")}
    assert main(arguments) == 0
    assert "root/s3/dense/run_0 is finished" in capsys.readouterr().out
    assert main(["fit", "--resume", "root/s3/dense/run_0"]) == 0
    assert {path: path.stat().st_mtime_ns for path in Path("root").rglob("*")} == before


def test_only_the_same_configuration_is_continued(run: list[str]) -> None:
    for options in ([], ["--seed_everything=4"], ["--model.width=12"], ["--data.workers=1"]):
        short = ["--trainer.max_steps=10", "--resume=auto", "--trainer.default_root_dir=root"]
        assert main(["fit", *run, *short, *options]) == 0
    assert sorted(path.name for path in Path("root/s3/dense").iterdir()) == ["run_0", "run_1", "run_2"]


def test_a_folder_is_continued_by_its_own_configuration(run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("root/s3/dense/run_0")
    process = start(["fit", *run, "--trainer.default_root_dir=root"])
    wait_until(lambda: steps_logged(folder) > 12, process)
    process.terminate()
    process.join()
    assert ran(["fit", "--resume", str(folder)]) == ran(["fit", *run, "--trainer.default_root_dir=straight"]) == 0
    assert [path.name for path in folder.parent.iterdir()] == ["run_0"]
    assert_same_run(folder, Path("straight/s3/dense/run_0"))


def test_two_processes_never_train_in_one_folder(
    run: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fit", *run, "--trainer.default_root_dir=root", "--resume=auto", "--trainer.max_steps=100000"]
    process = start(arguments)
    wait_until(lambda: steps_logged(Path("root/s3/dense/run_0")) > 0, process)
    monkeypatch.setattr("fprnn_lightning.run_folders.PATIENCE", 0.5)
    assert main(arguments) == 2
    assert "another process is training in root/s3/dense/run_0" in capsys.readouterr().err
    process.terminate()
    process.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_told_in_one_line(run: list[str], number: int) -> None:
    process = start(["fit", *run, "--trainer.default_root_dir=root", "--trainer.max_steps=100000"])
    wait_until(lambda: steps_logged(Path("root/s3/dense/run_0")) > 3, process)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 128 + number
    said = Path("output.log").read_text()
    last = said.splitlines()[-1]
    assert last.startswith(f"ended by {number.name} after step ")
    assert last.endswith("the same command with --resume auto goes on from there")
    assert "Traceback" not in said
    step = read_checkpoint("root/s3/dense/run_0/last.ckpt")["global_step"]
    assert f"after step {step}, saved in root/s3/dense/run_0/last.ckpt" in last
    assert steps_logged(Path("root/s3/dense/run_0")) == step


def test_slurm_is_told_to_start_the_job_again(run: list[str], tmp_path: Path) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\necho "$@" >> requeued\n')
    scontrol.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "fit", "SLURM_PROCID": "0"}
    command = [sys.executable, "-m", "fprnn_lightning", "fit", *run, "--trainer.default_root_dir=root"]
    environment = os.environ | slurm | {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "SLURM_LOCALID": "0"}
    process = subprocess.Popen(
        [*command, "--trainer.max_steps=100000", "--resume=auto"], env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = monotonic() + 120
    while steps_logged(Path("root/s3/dense/run_0")) < 3 and monotonic() < deadline:
        sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGUSR1, said
    assert Path("requeued").read_text() == "requeue 17\n"
    assert said.splitlines()[-1].endswith("SLURM has been told to start it again")
    assert read_checkpoint("root/s3/dense/run_0/last.ckpt")["global_step"] > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 300 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_no_checkpoint(run: list[str], small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", *run, f"--trainer.default_root_dir={small_disk}", "--resume=auto", "--trainer.max_steps=200"]
    folder = small_disk / "s3" / "dense" / "run_0"
    process = start(arguments)
    wait_until((folder / "last.ckpt").exists, process)
    (small_disk / "filling").write_bytes(b"0" * shutil.disk_usage(small_disk).free)
    process.join()
    assert process.exitcode == 2
    said = Path("output.log").read_text()
    assert said.splitlines()[-1].startswith("error: cannot write ")
    assert said.splitlines()[-1].endswith("No space left on device")
    assert "Traceback" not in said
    saved = read_checkpoint(folder / "last.ckpt")["global_step"]
    assert saved >= 10
    assert not list(folder.glob(".*.partial"))


def test_a_folder_that_cannot_be_written_is_told_in_one_sentence(
    run: list[str], small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert main(["fit", *run, f"--trainer.default_root_dir={small_disk}"]) == 2
    assert f"cannot make {small_disk}/s3" in capsys.readouterr().err


def test_a_checkpoint_cut_in_half_is_refused(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("root/s3/dense/run_0")
    process = start(["fit", *run, "--trainer.default_root_dir=root"])
    wait_until((folder / "last.ckpt").exists, process)
    process.kill()
    process.join()
    os.truncate(folder / "last.ckpt", (folder / "last.ckpt").stat().st_size // 2)
    before = {path: path.stat().st_mtime_ns for path in Path("root").rglob("*")}
    assert main(["fit", *run, "--trainer.default_root_dir=root", "--resume=auto"]) == 2
    assert "last.ckpt is not a checkpoint, or not a whole one" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in Path("root").rglob("*")} == before


@pytest.mark.parametrize("name", ["best", "last"])
def test_the_newest_best_or_last_checkpoint_is_found_by_name(run: list[str], name: str) -> None:
    options = [*run, "--trainer.default_root_dir=root", "--trainer.max_steps=10"]
    assert main(["fit", *options]) == main(["fit", *options, "--seed_everything=9"]) == 0
    assert main(["test", *options, "--ckpt_path", name]) == 0
    tested = Path("root/s3/dense/run_1/test_0/length_curve.csv")
    if name == "last":
        assert tested.read_text() == Path("root/s3/dense/run_1/length_curve.csv").read_text()
    assert tested.exists()


def test_without_a_run_there_is_no_best_checkpoint(run: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *run, "--trainer.default_root_dir=root", "--ckpt_path=best"]) == 2
    assert "no run in root/s3/dense has a best.ckpt yet" in capsys.readouterr().err
    assert main(["fit", *run, "--resume=root"]) == 2
    assert "resume: root is no run's folder" in capsys.readouterr().err
    assert not Path("root").exists()
