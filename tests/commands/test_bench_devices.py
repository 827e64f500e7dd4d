"""bench devices: what an optimiser step exchanges is counted and is what the cost model says; its page shows that."""

import csv
from pathlib import Path

import pytest

from fprnn_lightning.cli import main
from fprnn_lightning.commands import bench_devices
from fprnn_lightning.commands.bench_devices import (
    FIRST_BUCKET,
    FLOAT32,
    LINKS,
    Exchange,
    buckets,
    cost_table,
    efficiency,
    exchanged_bytes,
    latencies,
    small_seconds,
)

PAGE = Path(__file__).parents[2] / "configs" / "hardware" / "README.md"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    output = tmp_path_factory.mktemp("bench") / "devices.csv"
    sizes = ["--width=32", "--layers=2", "--batch=4", "--time=4"]
    assert main(["bench", "devices", *sizes, "--output", str(output)]) == 0
    with output.open() as file:
        return list(csv.DictReader(file))


def test_every_strategy_is_measured(rows: list[dict[str, str]]) -> None:
    assert list(rows[0]) == [
        *("mixer", "strategy", "processes", "parameters", "all_reduce", "all_gather", "reduce_scatter", "broadcast"),
        *("barrier", "send", "kilobytes", "milliseconds", "speedup"),
    ]
    strategies = [("one process", "1"), ("DDP", "2"), ("sharded", "2"), ("sliced", "2")]
    for mixer, measured in (("fp_rnn", strategies), ("dense", strategies[:3])):
        assert [(row["strategy"], row["processes"]) for row in rows if row["mixer"] == mixer] == measured
    for row in rows:
        assert float(row["milliseconds"]) > 0 and float(row["speedup"]) > 0
        assert float(row["speedup"]) == 1 or row["strategy"] != "one process"


def test_the_small_exchanges_are_those_of_the_cost_model(rows: list[dict[str, str]]) -> None:
    for row in rows:
        if row["strategy"] == "DDP":
            bulk = buckets(int(row["parameters"]))
            small = float(row["all_reduce"]) - bulk + float(row["barrier"]) + float(row["broadcast"])
            iterations = {"fp_rnn": 2 * 15, "dense": 0}[row["mixer"]]  # of two layers, but for the last
            assert small == pytest.approx(bench_devices.SMALL + iterations, abs=0.5)


def test_the_counts_are_those_of_the_strategy(rows: list[dict[str, str]]) -> None:
    blocks = 2
    for row in rows:
        weights = 0 if row["strategy"] in ("one process", "DDP") else 2 * blocks + 1  # the rest of the model once
        reports = 0 if row["strategy"] == "one process" else 0.2  # two every tenth step
        slices = blocks * (2 * 16 + 1) if row["strategy"] == "sliced" else 0  # scans and what changes, and a backward
        assert float(row["all_gather"]) == pytest.approx(weights + reports + slices)
        assert float(row["send"]) == (blocks * (16 + 1) if slices else 0)
        assert float(row["reduce_scatter"]) == (blocks + 1 if weights else 0)
        assert (float(row["all_reduce"]) > 0) == (row["strategy"] != "one process")


def test_the_bytes_are_those_of_the_cost_model(rows: list[dict[str, str]]) -> None:
    for row in rows:
        sent, parameters, processes = float(row["kilobytes"]), int(row["parameters"]), int(row["processes"])
        if row["strategy"] == "one process":
            assert sent == 0
        else:
            expected = exchanged_bytes(row["strategy"], parameters, processes) / 1e3
            if row["strategy"] == "sliced":  # states of 4 sequences and 64 channels
                expected += 2 * (16 * 3 + 2) * 4 * 4 * 64 / 1e3
            assert 0.9 * expected < sent < 1.02 * expected  # less if sharded: the embedding and the head, once


def test_the_bytes_of_a_ring() -> None:
    assert Exchange("all_reduce", 100).sent(2) == 100
    assert Exchange("all_gather", 100).sent(4) == Exchange("reduce_scatter", 100).sent(4) == 75
    assert Exchange("broadcast", 100).sent(4) == 100
    assert exchanged_bytes("DDP", 1e6, 8) == pytest.approx(7e6)
    assert exchanged_bytes("sharded", 1e6, 8) == pytest.approx(10.5e6)


def test_efficiency() -> None:
    assert efficiency(1.0, 0.0) == efficiency(1.0, 0.5, hidden=0.6) == 1
    assert efficiency(1.0, 1.0) == efficiency(1.0, 1.5, hidden=0.5) == efficiency(1.0, 0.5, small=0.5) == 0.5
    assert small_seconds(8, 1e-6) == pytest.approx(42e-6)


def test_the_latencies_are_those_of_the_counted_exchanges(rows: list[dict[str, str]]) -> None:
    blocks = 2
    for row in rows:
        if row["strategy"] == "sharded":
            reports = 0.2
            counted = float(row["all_gather"]) - reports + float(row["reduce_scatter"])
            assert latencies("sharded", int(row["parameters"]), blocks, 2) == pytest.approx(counted)


def test_latencies_grow_with_the_logarithm_of_the_processes() -> None:
    assert [buckets(numbers) for numbers in (1e3, FIRST_BUCKET / FLOAT32, 639_805, 125e6)] == [1, 1, 2, 21]
    assert latencies("DDP", 125e6, 12, 1024) == 21 * 2 * 10
    assert latencies("sharded", 125e6, 12, 1024) == (25 + 13) * 10
    assert latencies("sharded", 125e6, 12, 8) == (25 + 13) * 3


def test_the_table_counts_bytes_and_latencies() -> None:
    row = next(row for row in cost_table() if (row["blocks"], row["strategy"], row["GPUs"]) == (12, "sharded", 1024))
    bandwidth, latency = LINKS["InfiniBand"]
    exposed = 12 * 125e6 * 1023 / 1024 / bandwidth + 38 * 10 * latency
    small = 7 * 2 * 10 * latency
    assert row["InfiniBand"] == f"{10 / (0.1 + exposed + small):.0f}–{10 / (0.1 + small):.0f} %"


def test_the_page_shows_the_cost_table() -> None:
    lines = ["| " + " | ".join(map(str, row.values())) + " |" for row in cost_table()]
    assert "\n".join(lines) in PAGE.read_text()


def test_a_batch_that_cannot_be_shared_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "devices", "--processes=3", "--batch=4"]) == 2
    assert "processes is 3, must be at least 2 and divide the batch, which is 4" in capsys.readouterr().err
    assert main(["bench", "devices", "--processes=4", "--batch=4", "--time=3"]) == 2
    assert "processes is 4, must be at most as many as there are tokens, 3" in capsys.readouterr().err


def _fail(ranks: int) -> None:
    raise RuntimeError("cannot")


def test_a_process_that_fails_is_told() -> None:
    with pytest.raises(ValueError, match="one of 2 processes has failed"):
        bench_devices.run_together(_fail, 2)
