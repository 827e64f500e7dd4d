"""A file that is written whole is the old or the new one, never half of either."""

import errno
import os
from pathlib import Path

import pytest

from fprnn_lightning.whole_files import write_whole


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    for content in ("first", "second"):
        write_whole(tmp_path / "file.txt", lambda path, content=content: path.write_text(content))
        assert (tmp_path / "file.txt").read_text() == content
        assert os.listdir(tmp_path) == ["file.txt"]


def test_nobody_sees_it_half_written(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("ne")
        assert (tmp_path / "file.txt").read_text() == "old"
        path.write_text("new")

    (tmp_path / "file.txt").write_text("old")
    write_whole(tmp_path / "file.txt", write)
    assert (tmp_path / "file.txt").read_text() == "new"


def test_a_full_disk_leaves_the_old_file_and_its_name_in_the_error(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_text("ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "file.txt").write_text("old")
    with pytest.raises(OSError, match=r"No space left on device: '.*file.txt'"):
        write_whole(tmp_path / "file.txt", write)
    assert (tmp_path / "file.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".file.txt.partial").write_text("half of something longer")
    write_whole(tmp_path / "file.txt", lambda path: path.write_text("new"))
    assert (tmp_path / "file.txt").read_text() == "new"
    assert os.listdir(tmp_path) == ["file.txt"]
