"""Tasks by a real Ray of two workers, started in a process of its own for the time of the test."""

import json
import subprocess
import sys

import pytest

from fprnn_lightning.launchers import Ray
from fprnn_lightning.sentences import UsageError

LAUNCH = """
import json, sys
from pathlib import Path
from fprnn_lightning.launchers import Ray, Task

def shell(name, command):
    return Task(name, ("sh", "-c", command), Path("some", name))

meet = "touch {0}; until [ -e {1} ]; do sleep 0.02; done"  # ends only if both run at a time
both = [shell("a", meet.format("a", "b")), shell("b", meet.format("b", "a") + "; exit 7")]
launcher = Ray(cpus=1)
launcher.check()
snapshots = list(launcher.launch([*both, shell("c", "echo $OMP_NUM_THREADS; pwd")], 2, Path("some")))
launching = launcher.launch([shell("d", "trap 'echo stopped; exit' TERM; while :; do sleep 0.02; done")], None, Path())
while next(launching) != {"d": None}:
    pass
launching.close()
print(json.dumps(snapshots[-1]))
"""


@pytest.mark.slow  # to start Ray takes most of a minute on two cores
def test_two_tasks_run_at_a_time_and_closing_ends_them(tmp_path):
    ended = subprocess.run([sys.executable, "-c", LAUNCH], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {"a": "exit code 0", "b": "exit code 7", "c": "exit code 0"}
    assert (tmp_path / "some/c/output.log").read_text().splitlines()[1:] == ["1", str(tmp_path)]
    assert (tmp_path / "some/d/output.log").read_text().endswith("stopped\n")


def test_without_ray_the_check_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"Ray is not installed, pip install -c constraints.txt -e '.\[ray\]'"):
        Ray().check()
