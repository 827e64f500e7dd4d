"""Job arrays, submitted to programs that stand in for Slurm's and run the tasks on this machine."""

import os
import sys
import time
from pathlib import Path

import pytest

from fprnn_lightning.launchers import Slurm, Task
from fprnn_lightning.sentences import UsageError

SBATCH = '''
"""Runs a job array in the background, as many tasks at a time as the array says; each is a file of its index."""
import os, pathlib, subprocess, sys, time

array, parsable, script = sys.argv[1:]
assert parsable == "--parsable"
place = pathlib.Path(__file__).parent
(place / "arguments").write_text(array)
last, _, limit = array.removeprefix("--array=0-").partition("%")
waiting, running = list(range(int(last) + 1)), {}
for index in waiting:
    (place / f"task_{index}").write_text("PENDING")
print("42;cluster", flush=True)
if os.fork():
    os._exit(0)
for stream in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
while waiting or running:
    while waiting and len(running) < int(limit or 99):
        index = waiting.pop(0)
        (place / f"task_{index}").write_text("RUNNING")
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_CPUS_PER_TASK": "3"}
        running[index] = subprocess.Popen(["bash", script], env=environment)
    for index, process in list(running.items()):
        if process.poll() is not None:
            with (place / "accounts").open("a") as file:
                print(f"42_{index}|{'FAILED' if process.returncode else 'COMPLETED'}", file=file)
            (place / f"task_{index}").unlink()
            del running[index]
    time.sleep(0.02)
'''
SQUEUE = """
import pathlib, sys
place = pathlib.Path(__file__).parent
assert sys.argv[1:] == ["--noheader", "--array", "--jobs=42", "--format=%K %T"]
if (place / "forgotten").exists():
    sys.exit("slurm_load_jobs error: Invalid job id specified")
for task in place.glob("task_*"):
    try:
        print(task.name.removeprefix("task_"), task.read_text() or "PENDING")
    except FileNotFoundError:
        pass
"""
SACCT = """
import pathlib
print((pathlib.Path(__file__).parent / "accounts").read_text(), end="")
"""
SRUN = """
import os, sys
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder of programs, first on PATH."""
    place = tmp_path / "cluster"
    place.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("sacct", SACCT), ("srun", SRUN)):
        (place / name).write_text(f"#!{sys.executable} -S\n{text}")
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return place


def tasks(*commands):
    return [Task(f"run_{i}", ("sh", "-c", command), Path("some", f"run {i}")) for i, command in enumerate(commands)]


def launched(commands, jobs=None, **options):
    return list(Slurm(poll_seconds=0.02, **options).launch(tasks(*commands), jobs, Path("some")))


def test_tasks_run_as_an_array_and_end_in_slurms_words(cluster, capsys):
    snapshots = launched(["echo $OMP_NUM_THREADS; pwd", "echo 'it broke'; exit 7", "exit 0"], jobs=2)
    assert snapshots[-1] == {"run_0": "COMPLETED", "run_1": "FAILED", "run_2": "COMPLETED"}
    assert Path("some/run 0/output.log").read_text().split() == ["3", str(Path.cwd())]
    assert Path("some/run 1/output.log").read_text() == "it broke\n"
    assert (cluster / "arguments").read_text() == "--array=0-2%2"
    assert capsys.readouterr().out.startswith("job 42: 3 runs, their commands are in ")
    assert len(Path("some/slurm/commands.txt").read_text().splitlines()) == 3


def test_what_runs_and_what_waits_is_told(cluster):
    seconds = "until [ -e go ]; do sleep 0.02; done"
    launcher = Slurm(poll_seconds=0.02).launch(tasks(seconds, seconds), 1, Path("some"))
    while (snapshot := next(launcher)) != {"run_0": None}:
        assert snapshot == {}
    Path("go").touch()
    assert list(launcher)[-1] == dict.fromkeys(("run_0", "run_1"), "COMPLETED")
    assert (cluster / "arguments").read_text() == "--array=0-1%1"


def test_options_are_in_the_job_script(cluster):
    options = {"partition": "gpu", "time": "4:00:00", "gpus": 1, "cpus": 8, "memory": "16G", "lines": ["--account=me"]}
    launched(["true"], **options)
    script = Path("some/slurm/job.sh").read_text()
    head = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert set(head) == {
        "--job-name=some",
        f"--output={Path.cwd()}/some/slurm/%A_%a.log",
        "--ntasks=1",
        "--cpus-per-task=8",
        "--gpus=1",
        "--mem=16G",
        "--partition=gpu",
        "--time=4:00:00",
        "--signal=USR1@120",
        "--requeue",
        "--account=me",
    }


def test_only_what_is_given_is_asked_for(cluster):
    launched(["true"], signal=None, requeue=False)
    script = Path("some/slurm/job.sh").read_text()
    assert "--no-requeue" in script
    for option in ("--gpus", "--mem", "--partition", "--time", "--signal"):
        assert option not in script


def test_not_waiting_submits_only_and_a_queued_job_is_not_submitted_twice(cluster):
    assert launched(["until [ -e go ]; do sleep 0.02; done"], wait=False) == []
    with pytest.raises(UsageError, match=r"^1 runs of job 42 are still in Slurm's queue: .* scancel 42$"):
        launched(["true"])
    Path("go").touch()
    while list(cluster.glob("task_*")):
        time.sleep(0.02)
    (cluster / "accounts").unlink()
    assert launched(["true"])[-1] == {"run_0": "COMPLETED"}


def test_a_job_that_slurm_has_forgotten_has_ended(cluster):
    assert launched(["true"])[-1]
    (cluster / "forgotten").touch()
    (cluster / "sacct").unlink()
    assert launched(["true"])[-1] == {"run_0": "no longer in the queue"}


def test_a_queue_that_does_not_answer_is_asked_again(cluster, capsys):
    works = (cluster / "squeue").read_text()
    (cluster / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    launcher = Slurm(poll_seconds=0.02)
    original = launcher._submit

    def submit(*arguments):
        job = original(*arguments)
        os.system(f"(sleep 0.5; mv {cluster}/working {cluster}/squeue) &")
        return job

    (cluster / "working").write_text(works)
    (cluster / "working").chmod(0o755)
    launcher._submit = submit
    assert list(launcher.launch(tasks("true"), None, Path("some")))[-1] == {"run_0": "COMPLETED"}
    assert "launcher Slurm: squeue failed: Unable to contact slurm controller" in capsys.readouterr().err


def test_a_refusal_of_slurms_is_one_sentence(cluster):
    (cluster / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(UsageError, match=r"^launcher Slurm: sbatch failed: sbatch: error: invalid partition$"):
        launched(["true"])


def test_without_slurm_the_check_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="launcher Slurm: there is no sbatch here"):
        Slurm().check()
