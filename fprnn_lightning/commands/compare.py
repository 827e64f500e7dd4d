"""Runs side by side: a table, a page, a picture and CSV files.

Runs that differ only in their seeds make a group; of each measure a group has the mean and the deviation. Runs of
different tasks are never in one table or figure.
"""

import csv
import io
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from jsonargparse import ArgumentParser
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.progress import track
from rich.table import Table
from rich.text import Text

from fprnn_lightning.commands.compare_figures import picture
from fprnn_lightning.commands.compare_page import page
from fprnn_lightning.commands.groups import Measure, Section, sections, short, summary
from fprnn_lightning.commands.runs import Run, find_runs, read_run
from fprnn_lightning.sentences import SentenceErrors, UsageError

LABEL_WIDTH = 16  # of a mixer's label at least
NOTES = 12  # warnings that are printed; the page has all of them


class Parser(SentenceErrors, ArgumentParser):
    """Its errors are UsageErrors."""


def main(arguments: list[str]) -> None:
    """Runs the subcommand: its name, folders and options."""
    parser = Parser(prog="python -m fprnn_lightning compare", description=compare.__doc__.partition("\n\n    Args")[0])
    parser.add_argument("folders", nargs="+", type=str, help="Folders of runs, or with runs in them at any depth.")
    parser.add_argument(
        "--output", type=str | None, help="Folder to write into, made if it is not there (default: the first folder)"
    )
    options = parser.parse_args(arguments[1:])
    compare([Path(folder) for folder in options.folders], Path(options.output) if options.output else None)


def compare(folders: list[Path], output: Path | None = None) -> None:
    """Compares runs, finished or not, that are in some folders at any depth.

    Prints a table of the groups of runs that differ in nothing but their seeds, the best group first, and writes
    compare.html (curves, tables, differences), compare.png, compare.csv (a row a group) and compare_runs.csv (a row a
    run). What cannot be read of a run is told, and the rest of it is used.

    Args:
        folders: Folders of runs, or with runs in them.
        output: Folder to write into; the first of the folders if None.

    Raises:
        UsageError: If a folder does not exist, if there is no run in them, or if the files cannot be written.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"compare: {folder} is {'no folder' if folder.exists() else 'not there'}")
    named = " or ".join(map(str, folders)) if len(folders) <= 3 else f"{len(folders)} folders, {folders[0]} the first"
    found = find_runs(folders)
    if not found:
        raise UsageError(f"compare: no run in {named}, a run is a folder with a config.yaml or with event files")
    progress = Console(stderr=True)
    steps = track(
        found, f"reading {len(found)} runs", console=progress, transient=True, disable=not progress.is_terminal
    )
    runs = [read_run(folder) for folder in steps]
    left_out = {run.folder: why for run in runs if (why := useless(run))}
    used = [run for run in runs if run.folder not in left_out]
    if not used:
        first, why = next(iter(left_out.items()))
        raise UsageError(f"compare: nothing to compare in {named}, {len(left_out)} without results: {first}, {why}")
    repeats(used)
    parts = sections(used)
    output = output or folders[0]
    texts = {
        "compare.html": page(parts, left_out, folders).encode(),
        "compare.png": picture(parts),
        "compare.csv": table_of_groups(parts).encode(),
        "compare_runs.csv": table_of_runs(parts, left_out).encode(),
    }
    write(output, texts)
    show(parts, left_out)
    print(f"{output / 'compare.html'} has the curves; beside it {', '.join(list(texts)[1:])}")


def useless(run: Run) -> str:
    """Why a run can't be compared, "" if it can."""
    if not run.scalars and not run.curve:
        return "; ".join(["nothing is logged (yet)", *run.warnings])
    if not run.config and not run.hyperparameters and not run.steps:
        return "; ".join(["neither a configuration nor steps of training", *run.warnings])
    return ""


def repeats(runs: list[Run]) -> None:
    """Warns of finished runs that repeat another one, seed included, and so tell nothing of the deviation."""
    first: dict[tuple, Run] = {}
    for run in runs:
        if run.finished and run.config and run.seed:
            key = run.seed, *sorted(run.settings.items())
            if key in first:
                run.warnings.append(f"repeats {first[key].folder}, seed included, and counts nonetheless")
            first.setdefault(key, run)


def show(parts: list[Section], left_out: Mapping[Path, str]) -> None:
    """Prints the tables, and what is to be known of the runs."""
    console = Console()
    if len(parts) > 1:
        console.print(f"{len(parts)} tasks, each with a table of its own: {', '.join(part.task for part in parts)}.")
    for part in parts:
        console.print(fitting(part, console), highlight=False)
    notes = [f"{run.folder}: {note}" for part in parts for g in part.groups for run in g.runs for note in run.warnings]
    notes += [f"{folder}: left out, {why}" for folder, why in left_out.items()]
    for note in notes[:NOTES]:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    if len(notes) > NOTES:
        console.print(f"note: {len(notes) - NOTES} more in compare.html")


def fitting(part: Section, console: Console) -> Table:
    """The groups of a task as a table that the terminal has room for, without its last columns if need be."""
    measures = [measure for measure in part.measures if measure.name not in ("steps", "minutes")]
    for count in range(len(measures), 0, -1):
        for is_wide in (True, False) if count == len(measures) else (False,):
            shown = table(part, measures[:count], is_wide)
            if count < len(measures):
                shown.caption += f" {', '.join(m.head for m in measures[count:])}: see compare.html."
            shown.columns[0].max_width = None if is_wide else LABEL_WIDTH
            needed = Measurement.get(console, console.options.update(width=10_000), shown).maximum
            shown.columns[0].max_width = None
            if needed <= console.width:
                return shown
    return shown
    return shown


def table(part: Section, measures: list[Measure], is_wide: bool) -> Table:
    """The groups of a task: deviations beside the means if there is room, else below them."""
    has_parameters = is_wide and any(group.parameters for group in part.groups)
    shown = Table(title=part.task, caption=caption(part, measures), box=SIMPLE_HEAD, padding=(0, 1 if is_wide else 0))
    shown.title_justify = shown.caption_justify = "left"
    shown.add_column("mixer", overflow="fold", min_width=LABEL_WIDTH)
    for head in ("runs", *["parameters"] * has_parameters, *(measure.head for measure in measures)):
        shown.add_column(head, justify="right", no_wrap=True)
    for group in part.groups:
        unfinished = sum(not run.finished for run in group.runs)
        cells = [(f"{len(group.runs) - unfinished}{f' + {unfinished}' if unfinished else ''}", "")]
        cells += [(short(group.parameters) if group.parameters else "–", "")] * has_parameters
        cells += [summary(group, measure) for measure in measures]
        label = Text.assemble(("■ ", group.style.colour), group.label)
        shown.add_row(label, *((" " if is_wide else "\n").join(filter(None, cell)) for cell in cells))
    return shown


def caption(part: Section, measures: list[Measure]) -> str:
    """What the columns of a table are, and how it is ordered."""
    sentences = [f"Best first, by {', then '.join(m.head.removesuffix(' %') for m in part.ranking)}."]
    sentences += [f"{m.head}: {part.title(m)}." for m in measures if m.head != m.title]
    if not all(run.finished for group in part.groups for run in group.runs):
        sentences.append("runs: finished + unfinished.")
    if any(len(group.runs) > 1 for group in part.groups):
        sentences.append("Mean ± deviation over the runs of a group.")
    if any(group.is_provisional for group in part.groups):
        sentences.append("* in the last validation, as no run is finished.")
    return " ".join(sentences)


def table_of_groups(parts: list[Section]) -> str:
    """A row for each group, with all digits."""
    measures = {measure.name: None for part in parts for measure in part.measures}
    rows = []
    for part in parts:
        differing = part.differences()
        known = [group for group in part.groups if group.known]
        for group in part.groups:
            row = {
                "task": part.task,
                "group": group.label,
                "runs": len(group.runs),
                "unfinished": sum(not run.finished for run in group.runs),
                "seeds": " ".join(run.seed or "?" for run in group.runs),
                "trained_length": group.runs[0].trained_length,
                "parameters": group.parameters,
                "provisional": group.is_provisional,
            }
            for name in measures:
                values = next((group.values(measure) for measure in part.measures if measure.name == name), [])
                row |= {
                    f"{name}_mean": statistics.fmean(values) if values else None,
                    f"{name}_deviation": statistics.stdev(values) if len(values) > 1 else None,
                    f"{name}_runs": len(values),
                }
            if group.known:
                row |= {option: values[known.index(group)] for option, values in differing.items()}
            rows.append(row)
    return as_csv(rows)


def table_of_runs(parts: list[Section], left_out: Mapping[Path, str]) -> str:
    """A row for each run, those left out at the end."""
    rows = []
    for part in parts:
        for group in part.groups:
            for run in group.runs:
                measured = {measure.name: measure.value(run) for measure in part.measures}
                start = {"task": part.task, "group": group.label, "folder": run.folder, "seed": run.seed}
                status = "finished" if run.finished else "unfinished"
                rows.append(start | {"status": status, **measured, "notes": "; ".join(run.warnings)})
    rows += [{"folder": folder, "status": "left out", "notes": why} for folder, why in left_out.items()]
    return as_csv(rows)


def as_csv(rows: list[dict]) -> str:
    """Rows as CSV, with the columns of all of them; empty where a row has none."""
    columns = dict.fromkeys(name for row in rows for name in row)
    with io.StringIO() as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes files that all appear once all of them are complete.

    Raises:
        UsageError: If they cannot be written; then there is none, and what was there before still is.
    """
    temporary = {folder / f".{name}.{os.getpid()}": folder / name for name in contents}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(temporary, contents.values(), strict=True):
            path.write_bytes(content)
        for path, final in temporary.items():
            os.replace(path, final)
    except OSError as error:
        raise UsageError(f"compare: cannot write into {folder}, {error.strerror}; --output names another") from error
    finally:
        remove(temporary)


def remove(paths: Iterable[Path]) -> None:
    """Removes what there is of some files."""
    for path in paths:
        if path.exists():
            path.unlink()
