"""The page of a comparison: one file that needs no other and no network, and says so to the browser."""

import os
import statistics
from base64 import b64encode
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

from fprnn_lightning.commands.compare_figures import panels, svg, swatch
from fprnn_lightning.commands.groups import Section, minutes, summary
from fprnn_lightning.commands.runs import Run

HERE = Path(__file__).parent
FEW_RUNS = 20  # whose table need not be opened


class Cell(NamedTuple):
    """A cell of a table.

    Args:
        html: what it shows.
        value: what it is sorted by, None for its text.
        kind: its class, "text" on the left, "" on the right.
    """

    html: str
    value: str | None = None
    kind: str = ""


def page(sections: list[Section], left_out: Mapping[Path, str], folders: list[Path]) -> str:
    """The page as HTML.

    Args:
        sections: one for each task.
        left_out: runs that are not in them, and why.
        folders: where the runs are from.
    """
    script = (HERE / "compare_page.js").read_text()
    runs = sum(len(group.runs) for section in sections for group in section.groups)
    several = f", {len(sections)} tasks, each by itself" if len(sections) > 1 else ""
    title = f"Comparison of {', '.join(section.task for section in sections)}"
    where = ", ".join(map(str, folders)) if len(folders) <= 3 else common(folders)
    introduction = (
        f"{runs} runs in {where}{several}. Made {datetime.now():%Y-%m-%d %H:%M}. "
        "Runs that differ in nothing but their seeds are one group."
    )
    return Template((HERE / "compare_page.html").read_text()).substitute(
        title=escape(title),
        introduction=escape(introduction),
        sections="\n".join(_section(section, index, folders) for index, section in enumerate(sections)),
        left_out=_left_out(left_out),
        script=script,
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
    )


def _section(section: Section, number: int, folders: list[Path]) -> str:
    figures = []
    for index, panel in enumerate(panels(section)):
        drawn = svg(panel, section, number, f"figure{number}x{index}")
        for place, group in enumerate(section.groups):
            mark = f'data-group="{number}-{place}">'
            drawn = drawn.replace(mark, f"{mark}<title>{escape(group.label)}</title>")
        figures.append(f"<figure><figcaption>{escape(panel.title)}</figcaption>{drawn}</figure>")
    swatches = [_swatches(section, f"{where}{number}") for where in ("table", "legend", "differences")]
    legend = "".join(
        f'<label><input type="checkbox" checked value="{number}-{place}">{drawn}{escape(group.label)}</label>'
        for place, (group, drawn) in enumerate(zip(section.groups, swatches[1], strict=True))
    )
    several = any(len(group.runs) > 1 for group in section.groups)
    remarks = [f"Best first, by {', then '.join(map(section.title, section.ranking))}."]
    remarks += ["Mean ± deviation over the runs of a group."] if several else []
    if any(group.is_provisional for group in section.groups):
        remarks.append("* in the last validation, as no run of the group is finished.")
    bands = " Lines are means, bands go from the lowest to the highest run of a group." if several else ""
    holds = " In training, a finished run keeps its last value until the last of its group is finished."
    return "\n".join(
        [
            f'<section><h2>{escape(section.task)}</h2><p class="faint">{escape(" ".join(remarks))}</p>',
            _groups(section, number, swatches[0]),
            f'<fieldset class="legend" aria-label="groups shown in the figures">{legend}</fieldset>',
            f'<div class="figures">{"".join(figures)}</div>',
            f'<p class="faint">{escape((bands + holds).strip())}</p>' if several else "",
            _differences(section, swatches[2]),
            _runs(section, number, folders),
            "</section>",
        ]
    )


def _swatches(section: Section, name: str) -> list[str]:
    """A piece of the line of each group; names within a page differ."""
    return [swatch(group, f"{name}x{place}") for place, group in enumerate(section.groups)]


def _groups(section: Section, number: int, swatches: list[str]) -> str:
    heads = [("mixer", "text", 1), ("runs", "", 0)]
    heads += [("parameters", "", -1)] if any(group.parameters for group in section.groups) else []
    heads += [(section.title(measure), "", measure.better) for measure in section.measures]
    rows = []
    for group, drawn in zip(section.groups, swatches, strict=True):
        unfinished = sum(not run.finished for run in group.runs)
        more = f"<small>{unfinished} unfinished</small>" if unfinished else ""
        row = [
            Cell(f"{drawn} {escape(group.label)}", kind="text"),
            Cell(f"{len(group.runs)}{more}", str(len(group.runs))),
        ]
        if any(other.parameters for other in section.groups):
            row.append(_number(group.parameters, f"{group.parameters:,.0f}" if group.parameters else "–"))
        for measure in section.measures:
            mean, spread = summary(group, measure)
            values = group.values(measure)
            row.append(
                _number(
                    statistics.fmean(values) if values else None,
                    mean + (f"<small>{escape(spread)}</small>" if spread else ""),
                )
            )
        rows.append(row)
    return _table(f"groups-{number}", heads, rows)


def _runs(section: Section, number: int, folders: list[Path]) -> str:
    measures = [measure for measure in section.measures if measure.name not in ("steps", "minutes")]
    has_notes = any(run.warnings for group in section.groups for run in group.runs)
    heads = [("mixer", "text", 1), ("seed", "", 1), ("status", "text", 1), ("folder", "text", 1)]
    heads += [("steps", "", -1), ("minutes", "", -1)]
    heads += [(section.title(measure), "", measure.better) for measure in measures]
    heads += [("notes", "text", 1)] if has_notes else []
    rows = []
    for group in section.groups:
        for run in group.runs:
            status = run.status.replace(", last written", "<small>last written") + "</small>" * (not run.finished)
            row = [
                Cell(escape(group.label), kind="text"),
                Cell(escape(run.seed or "–"), run.seed if run.seed.isdigit() else ""),
                Cell(status, kind="text"),
                Cell(escape(_relative(run, folders)), kind="text"),
                Cell(f"{run.steps:,}" + _allowed(run), str(run.steps)),
                _number(run.minutes, minutes(run.minutes)),
            ]
            for measure in measures:
                value = measure.value(run)
                row.append(_number(value, "–" if value is None else measure.text(value)))
            if has_notes:
                row.append(Cell(escape("; ".join(run.warnings)), kind="text note"))
            rows.append(row)
    noted = sum(bool(run.warnings) for group in section.groups for run in group.runs)
    title = f"{len(rows)} run{'s' * (len(rows) > 1)}{f', {noted} with notes' if noted else ''}"
    is_open = " open" * (len(rows) <= FEW_RUNS)
    return f"<details{is_open}><summary>{title}</summary>{_table(f'runs-{number}', heads, rows)}</details>"


def _allowed(run: Run) -> str:
    """Of how many steps, where a run isn't finished and that is known."""
    return f"<small>of {run.max_steps:,}</small>" if not run.finished and run.max_steps else ""


def _differences(section: Section, swatches: list[str]) -> str:
    options = section.differences()
    if not options:
        return ""
    known = [(g, drawn) for g, drawn in zip(section.groups, swatches, strict=True) if g.known]
    heads = "".join(f'<th class="text">{drawn}<br>{escape(group.label)}</th>' for group, drawn in known)
    rows = "".join(
        f'<tr><th class="text" scope="row">{escape(option)}</th>'
        + "".join(f'<td class="text">{escape(value) or "–"}</td>' for value in values)
        + "</tr>"
        for option, values in options.items()
    )
    table = f'<table><thead><tr><th class="text">option</th>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    count = f"{len(options)} option{'s' * (len(options) > 1)}"
    return (
        f"<details open><summary>What the groups differ in: {count}</summary>"
        f'<div class="scroll">{table}</div></details>'
    )


def _left_out(left_out: Mapping[Path, str]) -> str:
    rows = "".join(f"<li>{escape(str(folder))}: {escape(why)}</li>" for folder, why in left_out.items())
    return f"<section><h2>Left out</h2><ul>{rows}</ul></section>" if rows else ""


def _table(name: str, heads: list[tuple[str, str, int]], rows: list[list[Cell]]) -> str:
    """A table that can be sorted.

    Args:
        name: of the table, for the page's address.
        heads: title, class and whether more (1) or less (-1) is better, of each column.
        rows: its cells.
    """
    head = "".join(
        f'<th scope="col" class="{kind}" data-worst="{"ascending" if better > 0 and not kind else "descending"}">'
        f'<button type="button">{escape(title)}</button></th>'
        for title, kind, better in heads
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{cell.kind}"' + (f' data-value="{cell.value}"' if cell.value is not None else "") + ">"
            f"{cell.html}</td>"
            for cell in row
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="sortable" id="{name}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _number(value: float | None, html: str) -> Cell:
    """A number's cell; what is not known is sorted to the end."""
    return Cell(html, "" if value is None else repr(float(value)))


def common(folders: list[Path]) -> Path:
    """The innermost folder that all of some are in, the only one itself."""
    return Path(os.path.commonpath([folder.resolve() for folder in folders]))


def _relative(run: Run, folders: list[Path]) -> str:
    """A run's folder as seen from the one that all are in."""
    return str(run.folder.resolve().relative_to(common(folders)))
