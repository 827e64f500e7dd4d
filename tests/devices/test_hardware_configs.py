"""The parts in configs/hardware train when stacked on a run: on CPUs here, where a test has no GPU."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import Ranks, two_machines
from small_runs import difference, fit

from fprnn_lightning.cli import main

HARDWARE = Path(__file__).parents[2] / "configs" / "hardware"


def stacked(kind: str, folder: Path, part: str, *options: str) -> list[str]:
    return fit(kind, folder, f"--config={HARDWARE / part}.yaml", "--trainer.accelerator=cpu", *options)


@pytest.mark.parametrize("part", ["cpu", "one_gpu"])
def test_one_device(run: Callable[..., Path], tmp_path: Path, part: str) -> None:
    assert Ranks(main, 1, tmp_path, stacked("copying", tmp_path, part)).results() == [0]
    (folder,) = tmp_path.glob("logs/*/*/run_0")
    assert difference(folder, run("copying", 1), "train/loss") == 0


def test_many_gpus_started_as_a_user_does(run: Callable[..., Path], tmp_path: Path) -> None:
    """By Lightning, which starts the second process."""
    command = [sys.executable, "-m", "fprnn_lightning", *stacked("copying", tmp_path, "many_gpus")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--trainer.devices=2"],
        **{"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 120},
        env=environment | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "device cpu x 2" in done.stdout
    assert [path.name for path in tmp_path.glob("logs/*/*/*")] == ["run_0"]
    (folder,) = tmp_path.glob("logs/*/*/run_0")
    assert difference(folder, run("copying", 1), "train/loss") < 1e-5


def test_many_nodes_as_torchrun_starts_them(run: Callable[..., Path], tmp_path: Path) -> None:
    """Two machines with one process each, which see the same folder."""
    options = ["--trainer.devices=1", f"--trainer.default_root_dir={tmp_path / 'logs'}"]
    machines = two_machines(lambda own: stacked("copying", own, "many_nodes", *options), tmp_path)
    assert [machine.results() for machine in machines] == [[0], [0]]
    (folder,) = tmp_path.glob("logs/*/*/*")
    assert difference(folder, run("copying", 1), "train/loss") < 1e-5


def test_the_slurm_script_starts_a_run_that_goes_on_by_itself(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@"\n')
    srun.chmod(0o755)
    script = HARDWARE / "slurm.sbatch"
    allocation = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8"}
    started = subprocess.run(
        ["bash", "-eu", script, "--config", "a b.yaml"], env=allocation, capture_output=True, text=True, check=True
    ).stdout.split()
    assert started[:4] == ["python", "-m", "fprnn_lightning", "fit"]
    assert started[-2:] == ["--resume", "auto"]
    assert "--trainer.devices 8 --trainer.num_nodes 2" in " ".join(started)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script.read_text(), re.MULTILINE))
    assert options["signal"] == "USR1@120" and "requeue" in options
    assert options["ntasks-per-node"] == options["gpus-per-node"]
