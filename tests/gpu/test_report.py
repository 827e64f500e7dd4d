"""run_on_gpu.sh and its report, tried without a GPU: what is written, and that no failure gets lost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import compare
import pytest
import report
import torch

from fprnn_lightning.commands import bench

SCRIPT = Path(__file__).parent / "run_on_gpu.sh"
TESTS = (
    '<testsuites><testsuite errors="0" failures="1" skipped="2" tests="9" time="12.3">'
    '<testcase name="test_good"/>'
    '<testcase name="test_bad"><failure message="states: error 1,&#10;allowed 0"/></testcase>'
    "</testsuite></testsuites>"
)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU (80 GB)")
    monkeypatch.setattr(report, "version", lambda package: "3.7.1")


def test_a_report_holds_what_was_found(gpu, tmp_path):
    (tmp_path / "tests.xml").write_text(TESTS)
    (tmp_path / "compare.md").write_text("| linear_scan | 1.0e-07 |\n")
    (tmp_path / "scan.csv").write_text("op,ratio\nlinear_scan,0.93\n")
    path = report.write(tmp_path, tmp_path)
    assert path.name.startswith("some-gpu-80-gb-2")
    text = path.read_text()
    for part in (
        f"torch {torch.__version__}, triton 3.7.1, commit ",
        "All steps came to their end.",
        "6 passed, 1 failed, 2 skipped in 12 s.\n- test_bad: states: error 1, allowed 0\n",
        "| linear_scan | 1.0e-07 |",
        "| op | ratio |\n| --- | --- |\n| linear_scan | 0.93 |",
    ):
        assert part in text


def test_a_report_says_what_is_missing(gpu, tmp_path):
    (tmp_path / "problems.md").write_text("- 1/3 the backends agree: failed or out of time\n")
    text = report.write(tmp_path, tmp_path).read_text()
    assert "- 1/3 the backends agree: failed" in text
    assert "The tests did not come to their end." in text
    assert text.count("Not measured.") == 2


def test_errors_are_those_of_the_dtype(monkeypatch):
    monkeypatch.setattr(compare, "CASES", ((bench.linear_case, (2, 5, 3)),))
    _, *rows = compare.errors("cpu")
    assert [row.split(" | ")[1] for row in rows] == ["float32", "bfloat16", "float16"]
    for row, eps in zip(rows, (2**-23, 2**-7, 2**-10), strict=True):
        error, error_of_gradients = map(float, row.strip("| ").split(" | ")[2:])
        assert 0 < error < 8 * eps
        assert 0 < error_of_gradients < 8 * eps


def test_without_mamba_ssm_the_report_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    assert "not installed" in compare.mamba_ssm()


def run(python: Path | str, folder: Path) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": str(python), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([SCRIPT], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_without_a_gpu_the_script_says_what_to_do(tmp_path):
    ended = run(sys.executable, tmp_path)
    assert ended.returncode == 2
    (sentence,) = ended.stderr.splitlines()
    assert sentence.startswith("error: ")
    assert "CUDA build" in sentence


@pytest.mark.skipif(shutil.which("timeout") is None, reason="the script is for Linux")
@pytest.mark.parametrize("fails", ["pytest", "compare.py", "bench", "nothing"])
def test_the_script_goes_on_after_a_failure_and_reports_it(tmp_path, fails):
    python = tmp_path / "python"
    python.write_text(
        f'#!/usr/bin/env bash\necho "$*" >> {tmp_path}/calls\n'
        f'case "$*" in *{fails}*) exit 3;; *report.py*) cp "$2/problems.md" {tmp_path} 2>/dev/null;; esac; exit 0\n'
    )
    python.chmod(0o755)
    ended = run(python, tmp_path)
    calls = (tmp_path / "calls").read_text()
    assert [part in calls for part in ("pytest", "compare.py", "bench scan", "report.py")] == [True] * 4
    assert ended.returncode == (0 if fails == "nothing" else 1)
    assert (tmp_path / "problems.md").exists() == (fails != "nothing")
