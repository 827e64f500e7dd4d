"""A task as a process: its lock, its output, and that it ends with who started it."""

import signal
import subprocess
import sys
import time

import pytest

from fprnn_lightning.launchers import Task
from fprnn_lightning.launchers.process import ending, is_running, start, terminate


def task(tmp_path, command):
    return Task("some", ("sh", "-c", command), tmp_path / "some")


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_output_and_command_are_appended_to_the_log(tmp_path):
    for word in ("one", "two"):
        assert start(task(tmp_path, f"echo $WORD; echo wrong >&2; exit {len(word)}"), {"WORD": word}).wait() == 3
    text = task(tmp_path, "").log.read_text().splitlines()
    assert text == ["$ sh -c 'echo $WORD; echo wrong >&2; exit 3'", "one", "wrong", *text[:1], "two", "wrong"]


def test_a_folder_has_one_process_at_a_time(tmp_path):
    sleeps = task(tmp_path, "exec sleep 60")
    assert not is_running(sleeps)
    process = start(sleeps, {})
    assert is_running(sleeps)
    assert start(sleeps, {}) is None
    terminate([process])
    assert process.returncode == -signal.SIGTERM
    assert not is_running(sleeps)


@pytest.mark.skipif(sys.platform != "linux", reason="a service of Linux's")
def test_a_process_is_asked_to_end_when_its_parent_is_killed(tmp_path):
    stops = task(tmp_path, "trap 'echo stopped; exit' TERM; echo ready; while :; do sleep 0.05; done")
    code = f"from fprnn_lightning.launchers.process import *; from pathlib import *; start({stops!r}, {{}}).wait()"
    parent = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: stops.log.exists() and "ready\n" in stops.log.read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(stops))
    assert stops.log.read_text().endswith("ready\nstopped\n")


@pytest.mark.parametrize(("code", "words"), [(0, "exit code 0"), (143, "exit code 143"), (-9, "SIGKILL")])
def test_an_ending_is_told_in_words(code, words):
    assert ending(code) == words
