"""What a launcher does: it runs commands, each with a folder of its own, and says which run and how the others ended.

A launcher knows nothing of training. Whether a command did what it should is seen from its folder, by who launched it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Snapshot = dict[str, str | None]  # name of each task that was started: None while it runs, then how it ended


@dataclass(frozen=True)
class Task:
    """A command to run.

    Args:
        name: what it is called.
        command: program and arguments, run in the folder that the launcher was started in.
        folder: what the command prints is appended to output.log in it.
    """

    name: str
    command: tuple[str, ...]
    folder: Path

    @property
    def log(self) -> Path:
        """The file that has what the command printed."""
        return self.folder / "output.log"


class Launcher(ABC):
    """Runs tasks somewhere."""

    @abstractmethod
    def check(self) -> None:
        """Says whether tasks can be run in this way here.

        Raises:
            UsageError: if something is missing.
        """

    @abstractmethod
    def launch(self, tasks: Sequence[Task], jobs: int | None, folder: Path) -> Iterator[Snapshot]:
        """Runs the tasks, and yields a snapshot of them again and again until all have ended.

        Closing the iterator, or an exception inside it, ends what this process is responsible for.

        Args:
            tasks: what to run.
            jobs: how many at a time, at most; None leaves it to the launcher.
            folder: for files of the launcher's own.

        Raises:
            UsageError: if the tasks are refused.
        """
