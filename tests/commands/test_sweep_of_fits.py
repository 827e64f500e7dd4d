"""A sweep of real fits, killed in the middle and resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SIZES = {"batch_size": 4, "train_length": 4, "validation_lengths": [4], "test_lengths": [4]}
SWEEP = {
    "options": {
        "trainer": {"val_check_interval": 20, "accelerator": "cpu"},
        "data": {"class_path": "WordProblem", "init_args": {**SIZES, "validation_sequences": 4, "test_sequences": 4}},
        "data.group": "S3",
        "model": {"mixer": "LSTMMixer", "width": 8, "curriculum": "FixedLength"},
        "model.curriculum.length": 4,
    },
    "grid": {"trainer.max_steps": [20, 300, 21]},
}


@pytest.mark.slow
def test_a_killed_sweep_ends_as_if_it_had_not_been_killed(tmp_path):
    (tmp_path / "steps.yaml").write_text(yaml.safe_dump(SWEEP, sort_keys=False))
    command = [sys.executable, "-m", "fprnn_lightning", "sweep", "steps.yaml"]
    options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    runs = {steps: tmp_path / "logs" / "steps" / f"max_steps_{steps}" for steps in (20, 300, 21)}
    log = runs[300] / "output.log"
    killed = subprocess.Popen(command, **options)
    while not (log.exists() and "validation after step 20:" in log.read_text()):
        assert killed.poll() is None
        time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert subprocess.run([*command, "--resume"], **options, check=False).returncode == 0
    subprocess.run([*command, "--root", "straight"], **options, check=True)
    for steps, folder in runs.items():
        (run,) = folder.glob("s3/lstm/run_*")
        straight = tmp_path / "straight" / run.relative_to(tmp_path / "logs")
        assert (run / "length_curve.csv").read_text() == (straight / "length_curve.csv").read_text()
        assert (folder / "output.log").read_text().count("$ ") == (2 if steps == 300 else 1)
