"""Where runs are: <root>/<task>/<mixer>/run_<n>, and which of them a fit continues.

A run has its configuration in config.yaml and, once it is over, length_curve.csv, which is written last. Two runs are
the same if their configurations are, but for what changes where and how a run is computed and not what comes out.
"""

import errno
import fcntl
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, count
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import yaml

from fprnn_lightning.sentences import UsageError

CONFIGURATION, LAST_WRITTEN = "config.yaml", "length_curve.csv"
MACHINES = {  # what may differ between the processes of a run
    *(f"trainer.{name}" for name in ("default_root_dir", "logger", "enable_progress_bar", "enable_model_summary")),
    *("trainer.profiler", "data.workers"),
}
ASIDE = MACHINES | {  # what two configurations of the same run may differ in
    *(f"trainer.{name}" for name in ("accelerator", "strategy", "devices", "num_nodes", "accumulate_grad_batches")),
    *("model.recompute", "model.compile"),
}
UNLOCKABLE = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
PATIENCE = 20.0  # seconds: worker processes of a killed run hold its lock until they notice


def numbered(parent: Path, name: str) -> Iterable[Path]:
    """parent/<name>_0, parent/<name>_1 and so on."""
    return (parent / f"{name}_{n}" for n in count())


def make_folder(candidates: Iterable[Path]) -> Path:
    """Makes the first of the candidates that does not exist yet; two processes never get the same one."""
    for folder in candidates:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if Path(error.filename) != folder or folder.is_file():
                raise


def remove_if_unused(folder: Path) -> None:
    """Removes a folder into which nothing has been written, but event files that a logger has opened."""
    files = list(folder.iterdir())
    if all(file.name.startswith("events.out") for file in files):
        for file in files:
            file.unlink()
        folder.rmdir()


def runs(parent: Path) -> list[Path]:
    """The runs in a folder, the newest first."""
    found = (path for path in parent.glob("run_*") if path.name[4:].isdecimal() and path.is_dir())
    return sorted(found, key=lambda path: int(path.name[4:]), reverse=True)


def newest_like(parent: Path, configuration: dict[str, Any]) -> Path | None:
    """The newest run of the same configuration, None if there is none."""
    return next((run for run in runs(parent) if not differences(run, configuration)), None)


def differences(run: Path, configuration: dict[str, Any]) -> list[str]:
    """The options by which a run's configuration and another differ, without those that do not change the outcome."""
    ours, theirs = (options(each, ASIDE) for each in (configuration, read_configuration(run)))
    return [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]


def options(configuration: dict[str, Any], aside: Container[str]) -> dict[str, Any]:
    """The options by their dotted names, without those put aside, what is below these, and what is null."""
    return {
        name: value
        for name, value in _options(configuration)
        if not any(above in aside for above in accumulate(name.split("."), "{}.{}".format))
    }


def is_finished(run: Path) -> bool:
    """Whether a run has been trained and measured to its end."""
    return (run / LAST_WRITTEN).exists()


def read_configuration(run: Path) -> dict[str, Any]:
    """What a run's config.yaml holds, empty if there is none that can be read."""
    try:
        content = yaml.safe_load((run / CONFIGURATION).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def newest_checkpoint(parent: Path, name: str) -> Path:
    """The newest best.ckpt or last.ckpt (`name` is "best" or "last") of the runs in a folder.

    Raises:
        UsageError: if no run has one.
    """
    for run in runs(parent):
        if (run / f"{name}.ckpt").is_file():
            return run / f"{name}.ckpt"
    raise UsageError(f"ckpt_path: no run in {parent} has a {name}.ckpt yet, give a checkpoint's path or run fit first")


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keeps other processes out of a run's folder meanwhile; the lock ends with the process, however that ends.

    File systems that cannot lock a folder, such as NFS, keep nobody out.

    Raises:
        UsageError: if another process has it and does not end soon.
    """
    descriptor = os.open(run, os.O_RDONLY)
    try:
        started = monotonic()
        while not _try_to_lock(descriptor):
            if monotonic() - started > PATIENCE:
                raise UsageError(
                    f"resume: another process is training in {run}, wait for it or leave --resume out for a new run"
                )
            sleep(0.2)
        yield
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNLOCKABLE:
            raise
    return True


def _options(configuration: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; an option that is null is as good as absent."""
    for name, value in configuration.items():
        if isinstance(value, dict) and value:
            yield from _options(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}".replace(".init_args.", "."), value
