"""metrics.csv: what has been logged, once, with all its digits, over as many processes as a run takes."""

from pathlib import Path

from fprnn_lightning.callbacks import MetricsFile


def test_a_row_per_step_and_name(tmp_path: Path) -> None:
    table = MetricsFile(tmp_path / "run")
    table.log_metrics({"train/loss": 0.1, "epoch": 0}, step=9)
    table.log_metrics({"train/loss": 1 / 3, "train/length": 5}, step=19)
    lines = ["step,name,value", "9,train/loss,0.1", f"19,train/loss,{1 / 3!r}", "19,train/length,5.0"]
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines() == lines


def test_a_resumed_run_writes_its_later_rows_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,name,value\n9,a,1.0\n19,a,2.0\n29,a,3.0\n39,a")
    MetricsFile(tmp_path, first_step=20).log_metrics({"a": 4.0}, step=29)
    assert (tmp_path / "metrics.csv").read_text() == "step,name,value\n9,a,1.0\n19,a,2.0\n29,a,4.0\n"


def test_a_new_run_starts_a_new_table(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,name,value\n9,a,1.0\n")
    MetricsFile(tmp_path).log_metrics({"a": 4.0}, step=9)
    assert (tmp_path / "metrics.csv").read_text() == "step,name,value\n9,a,4.0\n"


def test_nothing_logged_leaves_no_file(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "run").save()
    assert not (tmp_path / "run").exists()
