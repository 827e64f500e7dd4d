"""bench solver: that it runs, and writes the rows and ratios it promises; never how fast."""

import csv

import pytest
import torch

from fprnn_lightning.cli import main
from fprnn_lightning.commands import bench_solver, timing
from fprnn_lightning.scan import backends

MEASURES = ["memory_bound", "torch.add", "matrix_product", "fused", "fused_with_product"]
MEASURES += ["composed", "composed_with_product", "fused_over_eager", "fused_over_eager_with_product"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench_solver, "SHAPE", (2, 3, 4))
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_rows_and_ratios(tmp_path, monkeypatch):
    def medians(clock, *calls):
        for call in calls:
            call()
        return [1e-3, 2e-3, 4e-3, 5e-3, 40e-3, 45e-3]

    monkeypatch.setattr(bench_solver, "medians", medians)
    assert main(["bench", "solver", "--output", str(tmp_path / "solver.csv")]) == 0
    with open(tmp_path / "solver.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["measure", "batch", "time", "channels", "milliseconds", "ratio"]
    assert [row["measure"] for row in rows] == MEASURES
    assert {(row["batch"], row["time"], row["channels"]) for row in rows} == {("2", "3", "4")}
    found = {row["measure"]: (float(row["milliseconds"]), float(row["ratio"])) for row in rows}
    bound = (2 * (3 * 4 + 1) + 3 * 4) / (3 * 4)  # raw terms and V y, x, y and f(y), against three arrays of torch.add
    assert found["memory_bound"] == (pytest.approx(bound, abs=1e-4), 1.0)
    assert found["fused"] == (4.0, pytest.approx(4 / bound, abs=1e-4))
    assert found["fused_over_eager"] == (4.0, 10.0)
    assert found["fused_over_eager_with_product"] == (5.0, 9.0)


def test_it_times(capsys):
    bench_solver.solver()
    printed = capsys.readouterr().out
    assert all(measure in printed for measure in MEASURES)


def test_without_a_kernel_it_says_so(capsys, monkeypatch):
    monkeypatch.setitem(backends.INSTALLED, "numba", False)
    assert main(["bench", "solver"]) == 2
    assert capsys.readouterr().err.startswith("error: bench solver: there is no fused iteration here")
