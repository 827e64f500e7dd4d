"""Whether SLURM can be told to start a job again is said, not raised. What signals do to runs: tests/test_resume.py."""

from pathlib import Path

import pytest

from fprnn_lightning.callbacks.stop_on_signal import requeue


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", ", and SLURM has been told to start it again"),
        ("echo 'Job is held,\n try later' >&2; exit 1", "could not be told to start it again: Job is held, try later"),
        ("exit 3", "could not be told to start it again: scontrol has ended with code 3"),
        (None, "could not be told to start it again: scontrol: No such file or directory"),
    ],
)
def test_whether_a_job_is_started_again_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "scontrol").chmod(0o755)
    assert requeue("17").endswith(said)
