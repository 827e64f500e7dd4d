"""The length-generalisation curve of a test: accuracy at every test length, printed as a table and written into the run
folder as `length_curve.csv` and `length_curve.png`; TensorBoard shows the figure and, with the length as the step, the
accuracies under `length_curve/`. Where answers to prompts were generated, their accuracies are among them.
"""

import csv
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter
from rich.console import Console
from rich.table import Table

from fprnn_lightning.figures import ACCURACIES, TRAINED, tidy
from fprnn_lightning.whole_files import write_whole

Row = dict[str, int | float]


class LengthCurve(Callback):
    """Prints, writes and logs the accuracies by length at the end of a test."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        results = {name: [v.item() for v in values] for name, values in pl_module.test_results().items()}
        sequences = results.pop("sequences")
        columns = {"length": pl_module.test_accuracy.lengths, **results, "sequences": sequences}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        trained_length = min(pl_module.curriculum.end, trainer.datamodule.trained_length)
        folder = Path(trainer.default_root_dir)
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            Console().print(table(rows))
            figure = draw(rows, trained_length, title=" / ".join(folder.parts[-3:]))
            write_whole(folder / "length_curve.png", lambda path: figure.savefig(path, format="png", dpi=150))
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure("length_curve", figure, trainer.global_step)
                    for row in rows:
                        for name in results:
                            logger.experiment.add_scalar(f"length_curve/{name}", row[name], row["length"])
        self.rows = rows

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()
            # last of all that a run writes: there it is over
            write_whole(Path(trainer.default_root_dir, "length_curve.csv"), lambda path: write_csv(self.rows, path))


def table(rows: list[Row]) -> Table:
    """The rows as a table for the terminal."""
    table = Table(title="Length generalisation", padding=(0, 0, 0, 1))  # eight columns fit into 80 characters
    for name in rows[0]:
        table.add_column(name.removesuffix("_accuracy").replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.4f}" if isinstance(value, float) else f"{value:,}" for value in row.values()))
    return table


def write_csv(rows: list[Row], path: Path) -> None:
    """The rows as CSV, accuracies with six decimals."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        for row in rows:
            writer.writerow(f"{value:.6f}" if isinstance(value, float) else value for value in row.values())


def draw(rows: list[Row], trained_length: int, title: str) -> Figure:
    """The accuracies over the length, on a logarithmic axis, with the lengths of training shaded."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    lengths = [row["length"] for row in rows]
    left, right = lengths[0] / 1.25, lengths[-1] * 1.25
    axes.axvspan(left, max(left, trained_length), color=TRAINED, zorder=0)
    drawn = [name for name in ACCURACIES if name in rows[0]]
    for name in drawn:
        colour, style = ACCURACIES[name]
        values = [row[name] for row in rows]
        axes.plot(lengths, values, style, color=colour, label=name.replace("_", " "), clip_on=False, zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda length, _: f"{length:.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel(f"length in tokens (shaded: up to {trained_length}, as trained)")
    axes.set_ylabel("accuracy")
    tidy(axes)
    axes.set_title(title, loc="left", fontsize="medium")
    figure.legend(frameon=False, loc="outside upper right", ncols=3)
    return figure
