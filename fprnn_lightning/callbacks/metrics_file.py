"""All that a run logs as one table, metrics.csv: a row per step and name, for all who would not read event files.

A resumed run continues the table: rows from the resumed step on, which it writes anew, are taken out first.
"""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from fprnn_lightning.whole_files import write_whole

HEADER = ["step", "name", "value"]


class MetricsFile(Logger):
    """Appends `step,name,value` to metrics.csv in a folder, value with all its digits.

    Args:
        folder: the run's; made if it is not there.
        first_step: rows of this step and later ones are dropped from a table that is there already.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        super().__init__()
        self.path = folder / "metrics.csv"
        self.first_step = first_step
        self.is_open = False

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self.is_open:
            self._open()
        rows = [[step, name, float(value)] for name, value in metrics.items() if name != "epoch"]
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)

    def log_hyperparams(self, params: Any, *args: Any, **options: Any) -> None:
        """Nothing: config.yaml has them."""

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, lambda partial: _write(partial, self._kept_rows()))
        self.is_open = True

    def _kept_rows(self) -> list[list[str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if len(row) == 3 and row[0].isdecimal()]
        return [row for row in rows if int(row[0]) < self.first_step]


def _write(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])
