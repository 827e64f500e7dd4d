"""Event files: the same as TensorBoard reads, the time of training, and what is left of damaged ones."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from fprnn_lightning.commands.event_files import KEPT, read_events

COUNT = 50


@pytest.fixture
def file(tmp_path: Path, write_events: Callable[..., None]) -> Path:
    """50 records of a loss after the first one, all of the same size."""
    path = tmp_path / "events.out.tfevents.1.host.1.0"
    write_events(path, [(10.0 + i, i, "train/loss", i) for i in range(COUNT)], start=10.0)
    return path


def losses(path: Path) -> list[float]:
    return read_events([path]).scalars["train/loss"].values.tolist()


def test_all_scalars_are_those_that_tensorboard_reads(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(20):
            writer.add_scalar("train/loss", 1 / (1 + step), step)
            writer.add_scalar("validation/token_accuracy_16", step / 20, step)
            writer.add_scalar("train/learning_rate", 0.1, step)
        writer.add_histogram("decays", np.arange(1000.0), 19)
    first = next(tmp_path.iterdir())
    first.rename(first.with_name("events.out.tfevents.1.host.1.0"))
    with SummaryWriter(str(tmp_path), purge_step=12) as writer:
        for step in range(12, 30):
            writer.add_scalar("train/loss", 2.0, step)
    theirs = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    ours = read_events(list(tmp_path.iterdir()))
    assert ours.warnings == []
    assert ours.scalars.keys() == {tag for tag in theirs.Tags()["scalars"] if tag.startswith(KEPT)}
    for tag, series in ours.scalars.items():
        points = [(event.step, event.value) for event in theirs.Scalars(tag)]
        assert list(zip(series.steps, series.values, strict=True)) == points
    assert ours.scalars["train/loss"].steps.tolist() == list(range(30))
    assert ours.scalars["validation/token_accuracy_16"].steps.tolist() == list(range(12))


def test_the_time_between_processes_and_lost_work_do_not_count(
    tmp_path: Path, write_events: Callable[..., None]
) -> None:
    first, second = (tmp_path / f"events.out.tfevents.{n}.host.1.0" for n in (100, 900))
    lost = (150.0, 5, "train/loss", 0.9)
    test = (500.0, 3, "length_curve/token_accuracy", 1.0)
    write_events(first, [(110.0, 1, "train/loss", 1.0), (120.0, 2, "train/loss", 0.9), lost, test], start=100.0)
    write_events(second, [(903.0, 4, "train/loss", 0.8), (907.0, 6, "train/loss", 0.7)], start=900.0, resumed_at=4)
    series = read_events([second, first]).scalars["train/loss"]
    assert series.steps.tolist() == [1, 2, 4, 6]
    assert series.seconds.tolist() == [10.0, 20.0, 23.0, 27.0]


def test_hyperparameters(tmp_path: Path, write_events: Callable[..., None]) -> None:
    path = tmp_path / "events.out.tfevents.1.host.1.0"
    write_events(path, [], 1.0, mixer="dense", parameters=1234.0)
    assert read_events([path]).hyperparameters == {"mixer": "dense", "parameters": 1234.0}


def test_a_file_that_is_cut_off_keeps_its_whole_records(file: Path) -> None:
    data = file.read_bytes()
    for cut in (1, 3, 10, 20):
        file.write_bytes(data[:-cut])
        assert losses(file) == list(range(COUNT - 1))
        assert read_events([file]).warnings == [
            f"{file.name} is cut off in its last record, {COUNT} records of it are used"
        ]


def test_a_wrong_byte_costs_one_record_whether_in_the_content_or_in_the_length(file: Path) -> None:
    data = file.read_bytes()
    size = (len(data) - len(data[: data.index(b"train/loss")])) // COUNT
    value = data.index(b"train/loss") + 10 + 2 + 5 * size  # within the content of the sixth loss
    length = data.index(b"train/loss") - 12 - 12 + 5 * size
    for place in (value, *range(length, length + 2)):
        broken = bytearray(data)
        broken[place] ^= 0x55
        file.write_bytes(broken)
        left = losses(file)
        assert len(left) >= COUNT - 2
        assert set(left) < set(range(COUNT)), "no wrong value is taken for a right one"
        assert read_events([file]).warnings[0].startswith(f"{file.name} is damaged in 1 place")


def test_bytes_too_many_or_too_few_in_the_middle(file: Path) -> None:
    data = file.read_bytes()
    middle = len(data) // 2
    for broken in (data[:middle] + b"garbage" + data[middle:], data[:middle] + data[middle + 11 :]):
        file.write_bytes(broken)
        left = losses(file)
        assert len(left) >= COUNT - 3
        assert set(left) < set(range(COUNT))
        assert "damaged" in read_events([file]).warnings[0]


def test_bytes_too_many_between_two_records_cost_none(file: Path) -> None:
    data = file.read_bytes()
    last = data.rindex(b"train/loss")
    size = last - data[:last].rindex(b"train/loss")
    start = data.index(struct.pack("<Q", size - 16), len(data) // 2)
    file.write_bytes(data[:start] + b"abc" + data[start:])
    assert losses(file) == list(range(COUNT))


@pytest.mark.parametrize("content", [b"\0" * 100, b"no events at all, this is a text", b"short"], ids=len)
def test_a_file_of_something_else_holds_nothing(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    events = read_events([file])
    assert events.scalars == {}
    assert events.written is None
    assert len(events.warnings) == 1
    assert file.name in events.warnings[0]


def test_an_empty_file_and_one_that_is_gone(file: Path) -> None:
    file.write_bytes(b"")
    assert read_events([file]).warnings == [f"{file.name} is empty"]
    file.unlink()
    assert read_events([file]).warnings == [f"{file.name} cannot be read, No such file or directory"]
