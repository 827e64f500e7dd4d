"""Checkpoints are read by mapping them where that is possible; all others, and what is none, as ever."""

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fprnn_lightning.sentences import UsageError
from fprnn_lightning.training import WholeCheckpoints, read_checkpoint

NUMBERS = 100_000
MAPS = Path("/proc/self/maps")


def content(value: float) -> dict[str, Any]:
    return {"global_step": 3, "state_dict": {"weight": torch.full((NUMBERS,), value), "rest": torch.arange(4)}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "last.ckpt"
    WholeCheckpoints().save_checkpoint(content(1.0), path)
    return path


def test_a_checkpoint_is_mapped_and_outlives_its_replacement(path: Path) -> None:
    before = read_checkpoint(path)
    if MAPS.exists():
        assert str(path) in MAPS.read_text()
    WholeCheckpoints().save_checkpoint(content(2.0), path)
    torch.testing.assert_close(before, content(1.0), rtol=0, atol=0)
    torch.testing.assert_close(read_checkpoint(path), content(2.0), rtol=0, atol=0)


def test_what_is_done_to_the_tensors_does_not_reach_the_file(path: Path) -> None:
    read_checkpoint(path)["state_dict"]["weight"].add_(1)
    torch.testing.assert_close(read_checkpoint(path), content(1.0), rtol=0, atol=0)


def test_a_file_of_the_old_format_is_read(tmp_path: Path) -> None:
    torch.save(content(3.0), tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    torch.testing.assert_close(read_checkpoint(tmp_path / "old.ckpt"), content(3.0), rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_part_of_a_checkpoint_is_refused(tmp_path: Path, zipped: bool, share: float) -> None:
    path = tmp_path / "last.ckpt"
    torch.save(content(1.0), path, _use_new_zipfile_serialization=zipped)
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(UsageError, match="is not a checkpoint, or not a whole one"):
        read_checkpoint(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damage_is_told_in_one_sentence_or_is_in_the_numbers(path: Path) -> None:
    whole, generator = path.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(3):
            place = generator.randrange(1500)  # from the beginning or from the end
            damaged[generator.choice([place, -1 - place])] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            read_checkpoint(path)
        except UsageError as error:
            assert "last.ckpt" in str(error)
            refused += 1
    assert refused > 50


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for written in (b"words", pickle.dumps(Path("a"), 2), b"PK\x05\x06" + 18 * b"\0"):
        path.write_bytes(written)
        with pytest.raises(UsageError, match="is not a checkpoint, or not a whole one"):
            read_checkpoint(path)
    torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(UsageError, match="holds no model"):
        read_checkpoint(path)
    with pytest.raises(UsageError, match="does not exist"):
        read_checkpoint(tmp_path / "none.ckpt")
