"""bench mixers: every row is there, its numbers belong together, and memory does not grow where it must not."""

import csv

import pytest
import torch

from fprnn_lightning.cli import main
from fprnn_lightning.commands import bench_mixers, timing


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict[str, str]]:
    output = tmp_path_factory.mktemp("bench") / "mixers.csv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_mixers, "SHAPES", ((2, 9), (8, 32)))
        patch.setattr(bench_mixers, "WIDTH", 32)
        patch.setattr(timing, "SECONDS", 0.0)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert main(["bench", "mixers", "--output", str(output)]) == 0
    with output.open() as file:
        return list(csv.DictReader(file))


def test_every_mixer_is_timed_at_every_shape(rows):
    assert list(rows[0]) == [
        "mixer", "batch", "time", "channels", "milliseconds", "tokens_per_second", "peak_megabytes", "ratio_to_lstm",
    ]  # fmt: skip
    named = {"lstm", *bench_mixers.MIXERS, *(f"{name} bfloat16" for name in bench_mixers.BFLOAT16)}
    for batch, time in ((2, 9), (8, 32)):
        shape = (str(batch), str(time), "32")
        assert named <= {row["mixer"] for row in rows if (row["batch"], row["time"], row["channels"]) == shape}
    for row in rows:
        tokens = int(row["batch"]) * int(row["time"])
        seconds = float(row["milliseconds"]) / 1e3
        assert float(row["tokens_per_second"]) == pytest.approx(tokens / seconds, rel=0.05)
        assert float(row["peak_megabytes"]) > 0 and float(row["ratio_to_lstm"]) > 0


def test_iterations_take_memory_under_no_rule_but_unrolled(rows):
    megabytes = {row["mixer"]: float(row["peak_megabytes"]) for row in rows}
    for rule in ("OneStep", "Implicit"):
        two, *more = (megabytes[f"fp_rnn {rule}, {iterations} iterations"] for iterations in (2, 8, 32))
        assert max(more) <= 1.1 * two
    assert megabytes["fp_rnn Unrolled, 32 iterations"] > 3 * megabytes["fp_rnn Unrolled, 2 iterations"]
