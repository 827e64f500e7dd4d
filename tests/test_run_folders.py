"""Which folder a run gets, and which run is continued."""

import errno
from pathlib import Path

import pytest
import yaml

from fprnn_lightning import run_folders
from fprnn_lightning.sentences import UsageError

CONFIGURATION = {
    "seed_everything": 1,
    "trainer": {"max_steps": 5, "devices": 1},
    "data": {"class_path": "WordProblem", "init_args": {"group": "S3", "workers": 0}},
    "ckpt_path": None,
}


def write(run: Path, configuration: dict) -> None:
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(configuration))


def test_folders_are_numbered_and_never_shared(tmp_path: Path) -> None:
    parent = tmp_path / "a" / "b"
    made = [run_folders.make_folder(run_folders.numbered(parent, "run")) for _ in range(3)]
    assert made == [parent / "run_0", parent / "run_1", parent / "run_2"]


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(OSError, match="a"):
        run_folders.make_folder(run_folders.numbered(tmp_path / "a" / "b", "run"))


def test_the_newest_run_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    for name in ("run_2", "run_10", "run_x", "test_11"):
        (tmp_path / name).mkdir()
    (tmp_path / "run_12").write_text("a file")
    assert [run.name for run in run_folders.runs(tmp_path)] == ["run_10", "run_2"]


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"trainer": {"max_steps": 5, "devices": 4, "default_root_dir": "elsewhere"}}, True),
        ({"data": {"class_path": "WordProblem", "init_args": {"group": "S3", "workers": 3}}}, True),
        ({"data": {"class_path": "WordProblem", "init_args": {"group": "S4", "workers": 0}}}, False),
        ({"trainer": {"max_steps": 6, "devices": 1}}, False),
        ({"seed_everything": 2}, False),
        ({"ckpt_path": "other.ckpt"}, False),
    ],
)
def test_runs_are_the_same_if_nothing_differs_that_matters(tmp_path: Path, change: dict, is_same: bool) -> None:
    write(tmp_path / "run_0", CONFIGURATION)
    found = run_folders.newest_like(tmp_path, CONFIGURATION | change)
    assert found == (tmp_path / "run_0" if is_same else None)


def test_broken_runs_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "run_0", CONFIGURATION)
    write(tmp_path / "run_1", CONFIGURATION)
    for number, text in ((2, "trainer: {max_steps"), (3, "a word"), (4, "")):
        write(tmp_path / f"run_{number}", {})
        (tmp_path / f"run_{number}" / "config.yaml").write_text(text)
    (tmp_path / "run_5").mkdir()
    assert run_folders.newest_like(tmp_path, CONFIGURATION) == tmp_path / "run_1"


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    for run, name in (("run_0", "best"), ("run_1", "best"), ("run_2", "last")):
        (tmp_path / run).mkdir()
        (tmp_path / run / f"{name}.ckpt").write_text("")
    assert run_folders.newest_checkpoint(tmp_path, "best") == tmp_path / "run_1" / "best.ckpt"
    with pytest.raises(UsageError, match=r"no run in .*nowhere has a best.ckpt yet"):
        run_folders.newest_checkpoint(tmp_path / "nowhere", "best")


def test_a_lock_keeps_others_out_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folders, "PATIENCE", 0.1)
    with (
        run_folders.locked(tmp_path),
        pytest.raises(UsageError, match="another process is training in"),
        run_folders.locked(tmp_path),
    ):
        pass
    with run_folders.locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_used_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "as NFS says of a folder")

    monkeypatch.setattr("fcntl.flock", flock)
    with run_folders.locked(tmp_path):
        pass
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "another")))
    with pytest.raises(OSError, match="another"), run_folders.locked(tmp_path):
        pass


def test_what_changes_where_a_run_is_computed_leaves_it_the_same(tmp_path: Path) -> None:
    ours = {"model": {"recompute": False, "width": 8}, "trainer": {"devices": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(ours))
    sharded = {"class_path": "fprnn_lightning.training.Sharded", "init_args": {"slices": 2}}
    theirs = {"model": {"recompute": True, "compile": True, "width": 8}, "trainer": {"devices": 4, "strategy": sharded}}
    assert run_folders.differences(tmp_path, theirs) == []
    assert run_folders.differences(tmp_path, {"model": {"width": 9}}) == ["model.width"]


def test_a_folder_with_nothing_but_opened_event_files_is_removed(tmp_path: Path) -> None:
    for names in ((), ("events.out.tfevents.1",)):
        folder = tmp_path / "run_0"
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        run_folders.remove_if_unused(folder)
        assert not folder.exists()
    for name in ("events.out.tfevents.1", "config.yaml"):
        (tmp_path / name).touch()
    run_folders.remove_if_unused(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "events.out.tfevents.1"]
