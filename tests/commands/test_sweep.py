"""A sweep as a whole, with a program in place of `fit` that does as told: states, crashes, signals, resuming."""

import inspect
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from fprnn_lightning.cli import main
from fprnn_lightning.commands.sweep import sweep
from fprnn_lightning.launchers import Launcher, Local, Task
from fprnn_lightning.launchers.process import is_running
from fprnn_lightning.sentences import UsageError

FIT = '''
"""Writes down when it starts and ends; then crashes, waits to be stopped unless it has been before, or finishes."""
import os, signal, sys, time
from pathlib import Path

assert sys.argv[1] == "fit" and sys.argv[-2:] == ["--resume", "auto"]
options = dict(argument[2:].split("=", 1) for argument in sys.argv[2:-2])
root = Path(options["trainer.default_root_dir"])
folder = root / "z2" / "lstm" / "run_0"
folder.mkdir(parents=True, exist_ok=True)

def note(what):
    with (root / "notes").open("a") as file:
        print(what, file=file)

def stop(number, frame):
    time.sleep(0.5)  # as if saving
    note("stopped")
    sys.exit(143)

signal.signal(signal.SIGTERM, stop)
again = (root / "notes").exists()
note("started")
print("step 3/9  loss 1.5  accuracy 0.25", flush=True)
(root / "threads").write_text(os.environ["OMP_NUM_THREADS"])
if options["do"] == "crash":
    print("first line of many\\nit broke at step 4", flush=True)
    sys.exit(7)
while options["do"] == "wait" and not again:
    time.sleep(0.02)
note("finished")
(folder / "length_curve.csv").write_text("")
'''


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Path("fit.py").write_text(FIT)


@pytest.fixture(autouse=True)
def compared(monkeypatch):
    """What has been compared: the names of the runs, for each time."""
    times = []
    module = ModuleType("fprnn_lightning.commands.compare")
    module.compare = lambda folders, output=None: times.append([run.parents[2].name for run in folders])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return times


def write(**runs):
    """The sweep some.yaml of runs that do what is said."""
    settings = {name: {"name": name, "do": do} for name, do in runs.items()}
    Path("some.yaml").write_text(yaml.safe_dump({"runs": settings}, sort_keys=False))


def swept(check=lambda arguments: None, **options):
    sweep(Path("some.yaml"), check, program=(sys.executable, "fit.py"), **options)


def notes(run):
    path = Path("logs/some", run, "notes")
    return path.read_text().split() if path.exists() else []


def states():
    return {name: record["state"] for name, record in yaml.safe_load(Path("logs/some/state.yaml").read_text()).items()}


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def started():
    """Starts a sweep in a process of its own, and kills it in the end if need be."""
    processes = []

    def start():
        call = "sweep(Path('some.yaml'), lambda arguments: None, program=(sys.executable, 'fit.py'))"
        code = f"import sys; from pathlib import Path; from fprnn_lightning.commands.sweep import sweep; {call}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([sys.executable, "-c", code], **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_runs_finish_and_are_compared(compared, capsys):
    write(a="finish", b="finish")
    swept()
    assert states() == {"a": "finished", "b": "finished"}
    assert compared == [["a", "b"]]
    log = Path("logs/some/a/output.log").read_text().splitlines()
    assert log[0].endswith("fit.py fit --name=a --do=finish --trainer.default_root_dir=logs/some/a --resume auto")
    assert log[1].startswith("step 3/9")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "logs/some: 2 runs"
    assert sum("finished after" in line for line in out) == 2


def test_a_crash_is_recorded_and_stops_nothing(compared, capsys):
    write(a="crash", b="finish")
    with pytest.raises(SystemExit, match="1 of 2 runs crashed; --resume runs them again"):
        swept()
    assert compared == [["b"]]
    assert "a crashed with exit code 7, logs/some/a/output.log ends:" in (out := capsys.readouterr().out)
    assert out.endswith("\n    first line of many\n    it broke at step 4\n")
    record = yaml.safe_load(Path("logs/some/state.yaml").read_text())["a"]
    assert (record["state"], record["ended"], record["last_lines"][-1]) == (
        "crashed",
        "exit code 7",
        "it broke at step 4",
    )


def test_a_run_that_ends_well_but_unfinished_counts_as_crashed():
    write(a="finish")
    Path("fit.py").write_text("")
    with pytest.raises(SystemExit, match="1 of 1 runs crashed"):
        swept()


def test_jobs_run_at_a_time_and_share_the_cores(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    Path("fit.py").write_text(
        FIT.replace('note("finished")', 'while len(list(root.parent.glob("*/notes"))) < 2: time.sleep(0.02)')
    )
    write(a="finish", b="finish")
    swept(jobs=2)
    assert Path("logs/some/b/threads").read_text() == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    write(a="finish", b="finish", c="finish")
    swept(jobs=2, resume=True)
    assert Path("logs/some/c/threads").read_text() == "5"


def test_a_mistaken_run_is_told_before_the_first_one_starts():
    def check(arguments):
        if "--do=crash" in arguments:
            raise UsageError("it would crash")

    write(a="finish", b="crash")
    with pytest.raises(UsageError, match=r"^some.yaml: b: it would crash$"):
        swept(check)
    assert not Path("logs").exists()


def test_a_sweep_that_exists_is_refused():
    write(a="finish")
    swept()
    with pytest.raises(UsageError, match=r"^logs/some exists already: --resume goes on with it"):
        swept()
    assert notes("a") == ["started", "finished"]


def test_resuming_keeps_what_has_finished_and_repeats_what_crashed(compared):
    write(a="finish", b="crash")
    with pytest.raises(SystemExit):
        swept()
    write(a="finish", b="finish")
    swept(resume=True)
    assert notes("a") == ["started", "finished"]
    assert notes("b") == ["started", "started", "finished"]
    assert compared == [["a"], ["a", "b"]]
    swept(resume=True)
    assert compared[-1] == ["a", "b"]
    assert notes("b") == ["started", "started", "finished"]


def test_resuming_a_changed_file_adds_runs_and_leaves_others_alone(compared, capsys):
    write(a="finish", b="finish")
    swept()
    write(b="finish", c="finish")
    capsys.readouterr()
    swept(resume=True)
    assert capsys.readouterr().out.splitlines()[:2] == [
        "logs/some: 2 runs, 1 of them finished already",
        "no longer in the file, left alone: a",
    ]
    assert compared[-1] == ["b", "c"]
    assert states() == {"a": "finished", "b": "finished", "c": "finished"}


def test_a_finished_run_whose_options_have_changed_is_not_taken_for_the_new_one():
    write(a="finish")
    swept()
    write(a="crash")
    with pytest.raises(UsageError, match=r"^a has finished with other options.*--do=crash, --do=finish"):
        swept(resume=True)
    assert notes("a") == ["started", "finished"]


def test_a_killed_sweep_leaves_no_process_and_is_resumed(started, compared):
    write(a="finish", b="wait", c="finish")
    process = started()
    wait_until(lambda: notes("b"))
    process.kill()
    process.wait()
    swept(resume=True)  # while b is still saving
    assert notes("a") == ["started", "finished"]
    assert notes("b") == ["started", "stopped", "started", "finished"]  # never two at a time
    assert notes("c") == ["started", "finished"]
    assert compared == [["a", "b", "c"]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_runs_and_says_how_to_go_on(started, number, code):
    write(a="wait", b="finish")
    process = started()
    wait_until(lambda: notes("a"))
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == code
    assert told.splitlines() == [
        "waiting for 1 to save and end",
        "stopped; the same command with --resume goes on with logs/some",
    ]
    assert notes("a") == ["started", "stopped"]
    assert states() == {"a": "stopped", "b": "waiting"}
    assert not is_running(Task("a", (), Path("logs/some/a")))
    swept(resume=True)
    assert states() == {"a": "finished", "b": "finished"}


def test_two_sweeps_do_not_share_a_folder(started):
    write(a="wait")
    started()
    wait_until(lambda: notes("a"))
    with pytest.raises(UsageError, match=r"^a sweep is running in logs/some$"):
        swept(resume=True)
    assert notes("a") == ["started"]


def test_runs_that_were_only_submitted_are_not_compared(compared, capsys):
    class Submits(Local):
        def launch(self, tasks, jobs, folder):
            yield {}

    write(a="finish")
    swept(launcher=Submits())
    assert capsys.readouterr().out.endswith(
        "1 of 1 runs have not ended; the same command with --resume looks at them again\n"
    )
    assert compared == []


def test_a_launcher_that_cannot_run_leaves_nothing():
    class Broken(Local):
        def check(self):
            raise UsageError("no such cluster")

    write(a="finish")
    with pytest.raises(UsageError, match="no such cluster"):
        swept(launcher=Broken())
    assert not Path("logs").exists()


def test_a_run_that_goes_back_to_the_queue_waits_again():
    seen = []

    class Requeues(Launcher):
        def check(self):
            pass

        def launch(self, tasks, jobs, folder):
            for snapshot in ({"a": None}, {}, {"a": "exit code 0"}):
                yield snapshot
                seen.append(states()["a"])

    write(a="finish")
    with pytest.raises(SystemExit):
        swept(launcher=Requeues())
    assert seen == ["running", "waiting", "crashed"]


def refused(capsys, arguments, sentence):
    assert main(["sweep", *arguments]) == 2
    *_, told = capsys.readouterr().err.splitlines()
    assert told.startswith("error: ")
    assert sentence in told
    assert not Path("logs").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "missing file"),
        (["absent.yaml"], "absent.yaml: cannot be read, No such file or directory"),
        (["some.yaml", "--jobs", "0"], "jobs: 0 runs at a time, must be at least 1"),
        (["some.yaml", "--launcher", "slurm"], "launcher: unknown class slurm, nearest known: Slurm"),
        (["some.yaml", "--launcher", "Launcher"], "Launcher is abstract"),
        (["some.yaml", "--resum"], "unknown option resum, nearest known: resume"),
        (["some.yaml", "--resume"], "some.yaml: a: unknown option name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_on_the_command_line_is_told_in_one_sentence(capsys, arguments, sentence):
    write(a="finish")
    refused(capsys, arguments, sentence)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model.wdth": 8}, "some.yaml: wdth_8: unknown option model.wdth, nearest known: model.width"),
        ({"model.mixer": "LSTMMixr"}, "some.yaml: mixer_LSTMMixr: model.mixer: unknown class LSTMMixr"),
        ({"data.train_length": 8}, "train_length_8: model.curriculum ends at 16 tokens, data.train_length must be"),
        ({"model.layers": 0}, "layers_0: model has width 128 and 0 layers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_typo_in_a_late_run_is_told_before_anything_is_trained(capsys, options, sentence):
    ((key, value),) = options.items()
    task = Path(inspect.getfile(main)).parents[1] / "configs" / "task" / "a5.yaml"
    content = {"config": str(task), "options": {"model.mixer": "LSTMMixer"}}
    grid = {key: ["LSTMMixer" if key == "model.mixer" else 16, value]}
    Path("some.yaml").write_text(yaml.safe_dump({**content, "grid": grid if key != "model.wdth" else {key: [value]}}))
    refused(capsys, ["some.yaml"], sentence)


def test_the_help_explains_the_file(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["sweep", "--help"])
    out = capsys.readouterr().out
    assert "\n      seed: [0, 1, 2]  " in out
    for option in ("--jobs", "--resume", "--launcher", "--root"):
        assert f"\n  {option} " in out
    assert "program" not in out.partition("options:")[2]
