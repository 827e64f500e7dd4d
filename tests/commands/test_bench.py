"""bench: that it runs, and writes the columns it promises; never how fast."""

import csv

import pytest
import torch

from fprnn_lightning.cli import main
from fprnn_lightning.commands import bench, timing
from fprnn_lightning.scan import backends

COLUMNS = ["op", "backend", "batch", "time", "channels", "states", "direction"]
COLUMNS += ["milliseconds", "gigabytes_per_second", "ratio"]
CASES = (
    (bench.linear_case, (2, 3, 4)),
    (bench.selective_case, (2, 3, 4, 2)),
    (bench.dual_case, (1, 3, 2 * bench.HEAD, 2)),
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiny shapes, on the CPU also where there is a GPU."""
    monkeypatch.setattr(bench, "CPU_CASES", CASES)
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(bench, "TRAINING_BATCH", (2, 3))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_scan_writes_a_row_for_every_case_backend_and_direction(tmp_path, capsys):
    bench.scan(output=tmp_path / "scan.csv")
    rows = read(tmp_path / "scan.csv")
    assert list(rows[0]) == COLUMNS
    scans = [row for row in rows if row["op"] != "torch.exp"]
    assert [(r["op"], r["states"], r["backend"], r["direction"]) for r in scans] == [
        (op, states, backend, direction)
        for op, states in (("linear_scan", ""), ("selective_scan", "2"), ("state_space_dual", "2"))
        for backend in ("cpu", "reference")
        for direction in ("forward", "forward+backward")
    ]
    assert all(float(row["milliseconds"]) > 0 and float(row["ratio"]) > 0 for row in scans)
    printed = capsys.readouterr()
    assert all(column in printed.out for column in COLUMNS)
    assert "timing state_space_dual" in printed.err


def test_so_many_exponentials_as_selective_scan_needs_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "medians", lambda clock, *calls: [0.5] * len(calls))
    bench.scan("reference", tmp_path / "scan.csv")
    (exponentials,) = (row for row in read(tmp_path / "scan.csv") if row["op"] == "torch.exp")
    assert float(exponentials["milliseconds"]) == pytest.approx(500 * (2 * 3 * 4 * 2) / 2**18, abs=1e-4)


def test_bandwidth_counts_every_input_result_and_gradient_once(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "medians", lambda clock, *calls: [2e-9, 1e-9][: len(calls)])  # half as fast as torch.add
    bench.scan("reference", tmp_path / "scan.csv")
    found = {(r["op"], r["direction"]): (r["gigabytes_per_second"], r["ratio"]) for r in read(tmp_path / "scan.csv")}
    x = 2 * 3 * 4 * 4  # bytes
    assert found["linear_scan", "forward"] == (f"{3 * x / 2:.2f}", "0.5000")
    assert found["linear_scan", "forward+backward"] == (f"{8 * x / 2:.2f}", f"{8 / 3 / 2:.4f}")
    inputs = 2 * x + 4 * (4 * 2 + 2 * (2 * 3 * 2) + 4)  # x and dt, A, B and C, D
    assert found["selective_scan", "forward"][0] == f"{(inputs + x) / 2:.2f}"
    assert found["selective_scan", "forward+backward"][0] == f"{(3 * inputs + 2 * x) / 2:.2f}"


def test_only_the_backend_asked_for_is_timed(tmp_path):
    bench.scan("reference", tmp_path / "scan.csv")
    assert {row["backend"] for row in read(tmp_path / "scan.csv")} == {"reference", "torch"}


@pytest.mark.parametrize(
    ("backend", "parts"),
    [
        ("triton", ["'triton'", "on a GPU"]),
        ("cpu", ["'cpu'", "pip install numba"]),
        ("trtion", ["backend: expected", "'triton'", "got trtion"]),
    ],
)
def test_a_backend_that_cannot_run_is_told_in_one_sentence(capsys, monkeypatch, backend, parts):
    monkeypatch.setitem(backends.INSTALLED, "numba", False)
    assert main(["bench", "scan", "--backend", backend]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: ")
    assert all(part in sentence for part in parts)


def test_the_gpu_clock_reads_seconds_after_its_end(monkeypatch):
    class Event:
        """A GPU that takes 2 ms for anything, and is asked for the time only when it is done."""

        def __init__(self, enable_timing):
            self.done = not enable_timing

        def record(self):
            pass

        def synchronize(self):
            self.done = True

        def elapsed_time(self, end):
            assert end.done
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert bench.medians(bench.gpu_clock, lambda: None) == [0.002]


@pytest.mark.parametrize(("free", "numbers"), [(80e9, 2**27), (4e9, 2**26)])
def test_gpu_cases_fit_into_memory(monkeypatch, free, numbers):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), int(free)))
    linear = [shape for case, shape in bench.gpu_cases() if case is bench.linear_case]
    assert [shape[1] for shape in linear] == [128, 1024, 8192, 65536]
    assert {torch.Size(shape).numel() for shape in linear} == {numbers}


def test_data_divides_what_is_made_by_what_training_uses(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "medians", lambda clock, *calls: [0.5] * len(calls))
    bench.data(tmp_path / "data.csv")
    made, used = 256 * 512 / 0.5, 2 * 3 / 0.5
    for row in read(tmp_path / "data.csv"):
        assert list(row.values())[2:] == [f"{made:.0f}", f"{used:.0f}", f"{made / used:.0f}"]


def test_data_writes_tokens_per_second_and_restores_the_threads(tmp_path):
    threads = torch.get_num_threads()
    bench.data(tmp_path / "data.csv")
    rows = read(tmp_path / "data.csv")
    assert list(rows[0]) == ["task", "length", "tokens_per_second", "training_tokens_per_second", "ratio"]
    assert {"a5", "text", "parity", "modular_arithmetic_with_brackets", "associative_recall"} <= {
        row["task"] for row in rows
    }
    assert all(row["length"] == "512" and float(row["tokens_per_second"]) > 0 for row in rows)
    assert torch.get_num_threads() == threads


def test_without_output_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench.scan("reference")
    assert not list(tmp_path.iterdir())
