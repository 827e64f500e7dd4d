"""The figures of a comparison: accuracy by length, and what happened in training; a line for each group, with a band
from the lowest to the highest of its seeds. A training curve is the mean over the runs that have come so far; a
finished run keeps its last value until the last of its group is finished.
"""

import io
import re
from collections.abc import Callable
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from fprnn_lightning.commands.event_files import Series
from fprnn_lightning.commands.groups import Group, Section
from fprnn_lightning.commands.runs import Run
from fprnn_lightning.figures import GRID, TRAINED

POINTS = 400  # of a training curve at most: more than one sees
# colours that the page sets by itself, for light and for dark, and that nothing else has
PAGE_INK, PAGE_GRID, PAGE_SHADE = "#010203", "#040506", "#070809"


class Inks(NamedTuple):
    """Colours of what is no data."""

    ink: str = "#222222"
    grid: str = GRID
    shade: str = TRAINED


class Band(NamedTuple):
    """A curve over runs, each (N,)."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Panel(NamedTuple):
    """One pair of axes: what it shows, and what draws it."""

    title: str
    draw: Callable[[Axes, Section, Inks, str], None]


def panels(section: Section) -> list[Panel]:
    """Those that have something to show."""
    is_text = section.unit != "label"
    learnt = f"Bits per {section.unit} in validation" if is_text else "Tokens right in validation"
    scale = None if is_text else PercentFormatter(1)

    def progress(run: Run) -> Series:
        if is_text:
            return run.series(f"validation/bits_per_{section.unit}")
        return run.validated("token_accuracy", run.trained_length or 0)

    runs = [run for group in section.groups for run in group.runs]
    found = []
    if any(group.finished for group in section.groups):
        what = section.sequence_accuracy.removeprefix("generated_").removesuffix("_accuracy")
        generated = ", as generated" if section.is_prompted else ""
        right = f"{section.unit if is_text else what}s right by length{generated}"
        found.append(Panel(right.capitalize(), _by_length))
    if any(len(progress(run).values) for run in runs):
        for axis in ("steps", "minutes"):
            draw = _training(progress, axis, scale)
            found.append(Panel(f"{learnt}, by {axis}", draw))
    if any(len(run.iterations().values) for run in runs):
        found.append(Panel("Iterations in validation, by steps", _training(Run.iterations, "steps", None)))
    return found


def picture(sections: list[Section]) -> bytes:
    """All panels of all tasks with their legends, as PNG."""
    heights = [3.2 * -(-len(panels(section)) // 2) + 0.5 + 0.24 * -(-len(section.groups) // 2) for section in sections]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained", facecolor="white")
    parts = np.atleast_1d(figure.subfigures(len(sections), 1, height_ratios=heights))
    for part, section in zip(parts, sections, strict=True):
        shown = panels(section)
        grid = list(part.subplots(-(-len(shown) // 2), 2, squeeze=False).flat) if shown else []
        for axes, panel in zip(grid, shown, strict=False):
            panel.draw(axes, section, Inks(), "")
            axes.set_title(panel.title, loc="left", fontsize="medium")
        for axes in grid[len(shown) :]:
            axes.set_axis_off()
        lines = [_line(group) for group in section.groups]
        part.suptitle(section.task, x=0.01, ha="left", fontweight="bold")
        part.legend(lines, [group.label for group in section.groups], frameon=False, loc="outside lower left", ncols=2)
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=130)
        return file.getvalue()


def svg(panel: Panel, section: Section, number: int, name: str) -> str:
    """A panel as SVG to stand in a page: its lines are of the class `group`, and data-group says whose they are.

    Args:
        panel: what to draw.
        section: of what.
        number: of the section; the line of its second group is `<number>-1`.
        name: of the figure, made of letters and digits, another one for each figure of the page.
    """
    figure = Figure(figsize=(5.6, 3.3), layout="constrained")
    panel.draw(figure.subplots(), section, Inks(PAGE_INK, PAGE_GRID, PAGE_SHADE), f"{number}-")
    return _inline(figure, name, panel.title)


def swatch(group: Group, name: str) -> str:
    """A piece of a group's line as SVG."""
    figure = Figure(figsize=(0.5, 0.2))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    line = _line(group)
    line.set_data([0.05, 0.5, 0.95], [0.5, 0.5, 0.5])
    line.set_markevery([1])
    axes.add_line(line)
    return _inline(figure, name, "").replace("<svg ", '<svg aria-hidden="true" ', 1)


def band(runs: list[Series], axis: str, finished: list[bool]) -> Band:
    """Mean, lowest and highest of some scalars at the same steps, over the steps or the mean minutes of training.

    Args:
        runs: one for each run, none empty.
        axis: "steps" or "minutes".
        finished: which runs are, whose last values hold.
    """
    grid = np.unique(np.concatenate([series.steps for series in runs])).astype(float)
    if len(grid) > POINTS:
        grid = np.linspace(grid[0], grid[-1], POINTS)

    def at_grid(part: str) -> np.ndarray:
        ends = [getattr(series, part)[-1] if done else np.nan for series, done in zip(runs, finished, strict=True)]
        values = [getattr(series, part) for series in runs]
        return np.array(
            [
                np.interp(grid, series.steps, own, left=np.nan, right=end)
                for series, own, end in zip(runs, values, ends, strict=True)
            ]
        )

    curve = _band(grid + 1, at_grid("values"))
    if axis == "steps":
        return curve
    minutes = _band(grid + 1, at_grid("seconds") / 60)
    return curve._replace(x=np.maximum.accumulate(minutes.mean))


def by_length(group: Group, name: str) -> Band:
    """An accuracy of a group's finished runs by the lengths of their tests."""
    curves = [{row["length"]: row[name] for row in run.curve if name in row} for run in group.finished]
    lengths = sorted(set().union(*curves))
    values = np.array([[curve.get(length, np.nan) for length in lengths] for curve in curves])
    return _band(np.array(lengths), values)


def _band(x: np.ndarray, values: np.ndarray) -> Band:
    """Over the rows of the values (R, N), wherever one of them is a number."""
    known = np.isfinite(values).any(0)
    values = values[:, known]
    return Band(x[known], np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0))


def _by_length(axes: Axes, section: Section, inks: Inks, prefix: str) -> None:
    """The accuracy by length, on a logarithmic axis, with the lengths of training shaded."""
    lengths = sorted({row["length"] for group in section.groups for run in group.finished for row in run.curve})
    left, right = lengths[0] / 1.25, lengths[-1] * 1.25
    trained = section.trained_lengths
    if trained:
        axes.axvspan(left, max(left, trained[-1]), color=inks.shade, zorder=0, linewidth=0)
    for index, group in reversed(list(enumerate(section.groups))):  # the best on top
        if group.finished:
            _draw(axes, group, by_length(group, section.sequence_accuracy), f"{prefix}{index}", markevery=1)
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    axes.xaxis.set_major_locator(FixedLocator(_spaced(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda length, _: f"{length:.0f}")
    shaded = f" (shaded: up to {trained[-1]}, as trained)" if trained else ""
    _finish(axes, f"length in tokens{shaded}", PercentFormatter(1), inks)


def _training(progress: Callable[[Run], Series], axis: str, scale: PercentFormatter | None) -> Callable:
    """What draws a scalar over the steps or minutes of training."""

    def draw(axes: Axes, section: Section, inks: Inks, prefix: str) -> None:
        for index, group in reversed(list(enumerate(section.groups))):
            some = [(progress(run), run.finished) for run in group.runs]
            some = [(series, finished) for series, finished in some if len(series.values)]
            if some:
                series, finished = map(list, zip(*some, strict=True))
                curve = band(series, axis, finished)
                _draw(axes, group, curve, f"{prefix}{index}", markevery=max(1, len(curve.x) // 6))
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        _finish(axes, "steps" if axis == "steps" else "minutes of training", scale, inks)

    return draw


def _draw(axes: Axes, group: Group, curve: Band, name: str, markevery: int) -> None:
    line = _line(group)
    line.set_data(curve.x, curve.mean)
    line.set(markevery=markevery, gid=f"group:{name}:line", clip_on=False, zorder=3)
    axes.add_line(line)
    if (curve.low < curve.high).any():
        colour = group.style.colour
        axes.fill_between(
            curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0, gid=f"group:{name}:band", zorder=2
        )
    axes.update_datalim(np.column_stack([curve.x, curve.mean]))
    axes.autoscale_view()


def _line(group: Group) -> Line2D:
    """The line of a group, without data."""
    colour, marker = group.style
    return Line2D([], [], color=colour, marker=marker, markersize=5, linewidth=1.6, linestyle=group.dash)


def _finish(axes: Axes, xlabel: str, scale: PercentFormatter | None, inks: Inks) -> None:
    """Labels, limits and the colours of what is no data."""
    if scale:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(scale)
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(xlabel, color=inks.ink)
    axes.grid(axis="y", color=inks.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(inks.ink)
    axes.tick_params(color=inks.ink, labelcolor=inks.ink)


def _spaced(lengths: list[float]) -> list[float]:
    """Those of the lengths whose numbers have room on a logarithmic axis, the first one first."""
    room = (lengths[-1] / lengths[0]) ** (1 / 14)
    kept = lengths[:1]
    for length in lengths[1:]:
        if length >= kept[-1] * max(room, 1.05):
            kept.append(length)
    return kept


def _inline(figure: Figure, name: str, title: str) -> str:
    """A figure as SVG without what only a file of its own needs: page colours, one name for each of its parts."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), io.BytesIO() as file:
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None})
        text = file.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg role="img" viewBox="\1">', text, count=1)
    text = text.replace('<svg role="img"', f'<svg role="img" aria-label="{title}"', 1)
    text = re.sub(r'id="group:(.+?):(?:line|band)"', r'class="group" data-group="\1"', text)
    used = set(re.findall(r"(?:xlink:href=\"#|url\(#)([^\")]+)", text))
    text = re.sub(r'\s*\bid="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = text.replace("xlink:href", "href")
    for colour, own in ((PAGE_INK, "currentColor"), (PAGE_GRID, "var(--grid)"), (PAGE_SHADE, "var(--shade)")):
        text = text.replace(colour, own)
    return text.strip()
