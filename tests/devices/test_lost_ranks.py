"""What becomes of a run when processes are lost, told to end or cannot find each other: one sentence each, soon; and a
lost run goes on from its last checkpoint, on any number of ranks, as if nothing had happened.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest
from ranks import Ranks, command_line, free_port
from small_runs import difference, fit, table

from fprnn_lightning.cli import main

SHORT = (
    "--trainer.strategy.class_path=lightning.pytorch.strategies.DDPStrategy",
    "--trainer.strategy.init_args.timeout=0:00:03",
)


def wait_for(condition: Callable[[], bool], ranks: Ranks) -> None:
    deadline = monotonic() + 60
    while not condition():
        assert all(process.is_alive() for process in ranks.processes), ranks.outputs()
        assert monotonic() < deadline, ranks.outputs()
        sleep(0.01)


@pytest.mark.parametrize(("before", "after", "victim", "accumulated"), [(2, 1, 1, 4), (1, 2, 0, 1), (2, 4, 0, 1)])
def test_a_lost_run_goes_on_on_another_number_of_ranks(
    run: Callable[..., Path], tmp_path: Path, before: int, after: int, victim: int, accumulated: int
) -> None:
    arguments = [*fit("copying", tmp_path), "--resume=auto"]
    slowly = Ranks(_slowly, before, tmp_path, [*arguments, "--trainer.accelerator=cpu", f"--trainer.devices={before}"])
    folder = tmp_path / "logs/copying/lstm/run_0"
    wait_for((folder / "last.ckpt").exists, slowly)
    slowly.processes[victim].kill()
    codes = slowly.wait(20)
    assert codes[victim] == -9
    for rank in {*range(before)} - {victim}:
        assert codes[rank] == 1
        (sentence,) = (line for line in slowly.output(rank).splitlines() if line.startswith("error: "))
        assert sentence.startswith("error: another process of this run has ended or does not answer, so this one ends")
        assert "Traceback" not in slowly.output(rank)
    assert not (folder / "length_curve.csv").exists()
    again = [*arguments, f"--trainer.accumulate_grad_batches={accumulated}"]
    assert set(command_line(again, after, tmp_path).results()) == {0}
    straight = run("copying", 1)
    assert table(folder).keys() == table(straight).keys()
    assert difference(folder, straight, "train/loss") < 1e-5
    assert difference(folder, straight, "train/learning_rate", "train/length") < 1e-6


def _slowly(arguments: list[str]) -> None:
    """The command line, with steps that take a while once there is a checkpoint."""
    from fprnn_lightning.training import SequenceLearner

    step = SequenceLearner.training_step

    def training_step(self: SequenceLearner, batch: object, batch_idx: int) -> dict:
        sleep(1.0 if self.global_step >= 12 else 0.0)
        return step(self, batch, batch_idx)

    SequenceLearner.training_step = training_step
    raise SystemExit(main(arguments))


@pytest.mark.parametrize(
    ("number", "seconds", "code", "sentence"),
    [
        (signal.SIGKILL, 600, 1, "error: another process of this run has ended or does not answer, so this one ends"),
        pytest.param(
            *(signal.SIGKILL, 0.5, 1, "error: another process of this run has ended or does not answer"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(
                signal.SIGTERM,
                0.5,
                128 + signal.SIGTERM,
                r"ended by SIGTERM after step \d+, saved in logs/.*/last.ckpt",
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lost in a step without end", "lost", "told to end"],
)
def test_what_becomes_of_a_process_that_lightning_has_started(
    tmp_path: Path, number: int, seconds: float, code: int, sentence: str
) -> None:
    """Of a run started as a user does, the first process says what has become of the second, once."""
    step = f"sleep({seconds} if self.global_step >= 12 else 0) or step(self, batch, batch_idx)"
    (tmp_path / "run.py").write_text(
        "import sys\nfrom time import sleep\n"
        "from fprnn_lightning.cli import main\nfrom fprnn_lightning.training import SequenceLearner as Learner\n"
        "step = Learner.training_step\n"
        f"Learner.training_step = lambda self, batch, batch_idx: {step}\n"
        "sys.exit(main())\n"
    )
    part = f"--config={Path(__file__).parents[2] / 'configs' / 'hardware' / 'many_gpus.yaml'}"
    options = [part, "--trainer.accelerator=cpu", "--trainer.devices=2"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        [sys.executable, "run.py", *fit("copying", tmp_path, *options)],
        **{"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True},
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = monotonic() + 60
        logged = tmp_path / "logs/copying/lstm/run_0/metrics.csv"
        while not (logged.exists() and "\n11,train/loss," in logged.read_text()):
            assert process.poll() is None and monotonic() < deadline
            sleep(0.05)
        (other,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        sleep(0.5)  # they are in a slow step
        os.kill(int(other), number)
        said = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert process.returncode == code, said
    (told,) = (line for line in said.splitlines() if line.startswith(("error: ", "ended by ")))
    assert re.match(sentence, told)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("scontrol", "end"),
    [
        ("echo $@ >> requeued", ", and SLURM has been told to start it again"),
        ("echo no such job >&2; exit 1", ", but SLURM could not be told to start it again: no such job"),
    ],
    ids=["requeued", "refused"],
)
def test_a_signal_that_reaches_one_rank_ends_all_alike(tmp_path: Path, scontrol: str, end: str) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{scontrol}\n")
    (tmp_path / "scontrol").chmod(0o755)
    place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "a"}
    place |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    options = ["--resume=auto", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    ranks = Ranks(_slowly, 2, tmp_path, [*fit("copying", tmp_path), *options], environment=place)
    wait_for((tmp_path / "logs/copying/lstm/run_0/last.ckpt").exists, ranks)
    os.kill(ranks.processes[1].pid, signal.SIGUSR1)
    assert ranks.wait() == [128 + signal.SIGUSR1] * 2, ranks.outputs()
    (said,) = (line for rank in (0, 1) for line in ranks.output(rank).splitlines() if line.startswith("ended by "))
    assert said in ranks.output(0)
    assert said.startswith("ended by SIGUSR1 after step ") and said.endswith(end)
    assert "Traceback" not in ranks.outputs()
    if end.startswith(", and"):
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_processes_that_do_not_find_each_other_say_so(tmp_path: Path) -> None:
    """The first is told of two, the second of four."""
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    starts = []
    for rank, devices in ((0, 2), (1, 4)):
        options = ["--trainer.accelerator=cpu", f"--trainer.devices={devices}", *SHORT]
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(devices), **together}
        folder = tmp_path / str(rank)
        folder.mkdir()
        starts.append(Ranks(main, 1, folder, [*fit("copying", folder), *options], environment=place))
    for ranks in starts:
        assert ranks.wait(50) in ([1], [2])
        (told,) = (line for line in ranks.output(0).splitlines() if line.startswith("error: "))
        # the first may have found all that it waits for, and wait for an answer then
        assert re.match("error: (the processes .* have not found each other|another process .* does not answer)", told)
        assert "Traceback" not in ranks.output(0)
        assert not list(ranks.folder.glob("logs/*/*/*"))


def test_a_missing_machine_is_told(tmp_path: Path) -> None:
    """The first of two machines waits for the second, which is not started."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.num_nodes=2", *SHORT]
    first = Ranks(main, 1, tmp_path, [*fit("copying", tmp_path), *options], environment=place)
    assert first.wait(40) == [2]
    (told,) = (line for line in first.output(0).splitlines() if line.startswith("error: "))
    assert told.startswith("error: the processes of this run have not found each other; all must have the same")
    assert "Traceback" not in first.output(0)
    assert not list(tmp_path.glob("logs/*/*/*"))


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("no-such-host.invalid", "error: trainer: MASTER_ADDR is no-such-host.invalid, which has no network address"),
        ("192.0.2.1", "error: trainer: nobody answers at MASTER_ADDR 192.0.2.1, MASTER_PORT 29500, where the first"),
    ],
)
def test_a_wrong_master_address_is_told(tmp_path: Path, address: str, sentence: str) -> None:
    place = {"MASTER_ADDR": address, "MASTER_PORT": "29500", "LOCAL_RANK": "1", "RANK": "1", "NODE_RANK": "0"}
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", *SHORT]
    ranks = Ranks(main, 1, tmp_path, [*fit("copying", tmp_path), *options], environment=place)
    assert ranks.wait(40) == [2]
    assert ranks.output(0).splitlines()[-1].startswith(sentence)
    assert "frame #" not in ranks.output(0)


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        (["--trainer.accelerator=cpu", "--trainer.devices=4096"], {}, r"devices is 4096, but this machine's \d+ proc"),
        (["--trainer.accelerator=cpu", "--trainer.devices=3"], {}, r"batch_size is 16 .* 3 devices; 15 can"),
        (
            ["--trainer.accelerator=cpu", "--trainer.accumulate_grad_batches=5"],
            {},
            "batch_size is 16 .* 1 device with",
        ),
        (
            ["--trainer.accelerator=cpu", "--trainer.devices=2"],
            {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"},
            r"`devices=2` and `num_nodes=1`.* does not match the world size \(3\)",
        ),
        (
            ["--trainer.accelerator=cpu", "--trainer.devices=2"],
            {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0"},
            "the environment variable 'RANK' is missing",
        ),
        (["--trainer.accelerator=gpu", "--trainer.devices=64"], {}, "[Gg][Pp][Uu]"),
        (["--trainer.accelerator=cpu", "--trainer.devices=-1"], {}, "should be an int > 0"),
        (["--trainer.accelerator=cpu", "--trainer.devices=two"], {}, "should be an int > 0"),
        (
            ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp_spawn"],
            {},
            "strategy starts its processes as copies of this one, .* give ddp instead",
        ),
        (
            ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.limit_test_batches=1"],
            {},
            "limit_test_batches is 1 for each of 2 processes, .* give data.test_sequences instead",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_told_before_anything_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    environment: dict[str, str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([*fit("copying", tmp_path), *options]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.search(f"^error: trainer: .*{sentence}", told), told
    assert not list(tmp_path.glob("logs/*/*/*"))
