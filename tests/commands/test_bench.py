"""bench: that it runs, and writes the columns it promises; never how fast."""

import csv

import pytest
import torch

from fprnn_lightning.commands import bench


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", ((2, 3, 4), (1, 5, 2)))
    monkeypatch.setattr(bench, "SECONDS", 0.0)


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_scan_writes_a_row_for_every_shape_backend_and_direction(tmp_path, capsys):
    bench.scan(tmp_path / "scan.csv")
    rows = read(tmp_path / "scan.csv")
    columns = "op backend batch time channels direction milliseconds gigabytes_per_second ratio"
    assert list(rows[0]) == columns.split()
    assert [(r["batch"], r["backend"], r["direction"]) for r in rows] == [
        (batch, backend, direction)
        for batch in ("2", "1")
        for backend in ("reference", "cpu")
        for direction in ("forward", "forward+backward")
    ]
    assert all(float(r["milliseconds"]) > 0 and float(r["ratio"]) > 0 for r in rows)
    printed = capsys.readouterr().out
    assert all(column in printed for column in columns.split())


def test_data_writes_tokens_per_second_and_restores_the_threads(tmp_path):
    threads = torch.get_num_threads()
    bench.data(tmp_path / "data.csv")
    (row,) = read(tmp_path / "data.csv")
    assert list(row) == ["task", "length", "tokens_per_second"]
    assert (row["task"], row["length"]) == ("a5", "512")
    assert float(row["tokens_per_second"]) > 0
    assert torch.get_num_threads() == threads


def test_without_output_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bench.scan()
    assert not list(tmp_path.iterdir())
