"""Runs that differ in nothing but their seeds, as one group, and what is measured of a group: mean ± deviation,

    deviation = ( sum (value - mean)² / (n - 1) )^½,    none for n = 1

Tests are measured on finished runs. Where a group has none, the accuracies are those of the last validation so far, and
the group says that it is provisional.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from fprnn_lightning.commands.event_files import Series
from fprnn_lightning.commands.runs import Run, nearest_length
from fprnn_lightning.figures import Style, mixer_style

SOLVED = 0.9  # share of the sequences right at a length that counts as solved
LEARNT = 0.99  # share of the tokens right in validation that counts as learnt
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)))
LABELLED_DIFFERENCES = 3


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds.

    Args:
        label: what nothing else in the section is called.
        style: colour and marker of its mixer.
        dash: of its lines, as matplotlib knows it; another one for each group of the same style.
        runs: at least one.
        known: whether the configurations of the runs are known.
    """

    label: str
    style: Style
    dash: str | tuple
    runs: list[Run]
    known: bool

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished and run.curve]

    @property
    def is_provisional(self) -> bool:
        """Whether no run is finished."""
        return not self.finished

    @property
    def parameters(self) -> float | None:
        """How many each of the models has; None if it is not known."""
        return next((run.parameters for run in self.runs if run.parameters), None)

    def values(self, measure: "Measure") -> list[float]:
        """What is measured of each run that has it."""
        runs = self.finished if measure.of_test and self.finished else self.runs
        return [value for run in runs if (value := measure.value(run)) is not None and math.isfinite(value)]


@dataclass(frozen=True)
class Measure:
    """A number of a run.

    Args:
        name: in CSV files.
        head: of a column, as short as can be.
        title: of a column, in full; {length} is the trained length.
        value: takes it from a run, None where it has none.
        text: how it is written.
        of_test: whether finished runs alone count where there are any.
        better: -1 if less is better, 1 if more is, 0 if neither.
        is_length: whether it is one of a few lengths, of which a mean would be none.
    """

    name: str
    head: str
    title: str
    value: Callable[[Run], float | None]
    text: Callable[[float], str]
    of_test: bool = False
    better: int = 0
    is_length: bool = False


@dataclass(frozen=True)
class Section:
    """The groups of one task, the best first.

    Args:
        task: its name.
        groups: of its runs.
        unit: what a label is, "byte" for text; bits per label are of interest where it isn't "label".
        is_prompted: whether accuracies are of answers that were generated.
        measures: that some group has.
    """

    task: str
    groups: list[Group]
    unit: str
    is_prompted: bool
    measures: list[Measure]

    @property
    def ranking(self) -> list[Measure]:
        """By what the groups are ordered."""
        return [measure for measure in self.measures if measure.better and measure.name != "minutes_to_99"]

    @property
    def trained_lengths(self) -> list[int]:
        """Those of the runs, each once."""
        return sorted({run.trained_length for group in self.groups for run in group.runs if run.trained_length})

    @property
    def sequence_accuracy(self) -> str:
        """The name of the accuracy that the curves by length show."""
        if self.unit != "label":
            return "token_accuracy"
        return "generated_sequence_accuracy" if self.is_prompted else "sequence_accuracy"

    def title(self, measure: Measure) -> str:
        """The title of a measure's column."""
        lengths = self.trained_lengths
        return measure.title.format(length=lengths[0] if len(lengths) == 1 else "trained length", unit=self.unit)

    def differences(self) -> dict[str, list[str]]:
        """The options in which the groups of known configuration differ: a value a group, "" where it has none."""
        return differences([group.runs[0].settings for group in self.groups if group.known])


def sections(runs: list[Run]) -> list[Section]:
    """A section for each task of some runs, by their names."""
    by_task = defaultdict(list)
    for run in runs:
        by_task[run.task].append(run)
    return [_section(task, by_task[task]) for task in sorted(by_task)]


def _section(task: str, runs: list[Run]) -> Section:
    units = {tag.partition("bits_per_")[2] for run in runs for tag in run.scalars if "/bits_per_" in tag}
    unit = min(units - {"label"}, default="label")
    is_prompted = any("generated_sequence_accuracy" in row for run in runs for row in run.curve)
    groups, measures = _groups(runs), _measures(unit, is_prompted)
    measures = [measure for measure in measures if any(group.values(measure) for group in groups)]
    section = Section(task, groups, unit, is_prompted, measures)

    def rank(group: Group) -> tuple:
        means = (
            statistics.fmean(group.values(m)) if group.values(m) else -m.better * math.inf for m in section.ranking
        )
        ordered = (-m.better * mean for mean, m in zip(means, section.ranking, strict=True))
        return (group.is_provisional, *ordered, group.label)

    return replace(section, groups=sorted(groups, key=rank))


def _measures(unit: str, is_prompted: bool) -> list[Measure]:
    """What is measured, the most important first among those by which groups are ordered."""
    generated = "generated_" if is_prompted else ""
    as_generated = ", as generated" if is_prompted else ""

    def accuracy(name: str) -> Callable[[Run], float | None]:
        return lambda run: at_trained_length(run, name)

    tokens = Measure(
        "token_accuracy",
        f"{'tokens' if unit == 'label' else f'{unit}s'} %",
        f"% of {'tokens' if unit == 'label' else f'{unit}s'} right at {{length}}{as_generated}",
        accuracy(f"{generated}token_accuracy"),
        percent,
        of_test=True,
        better=1,
    )
    speed = [
        Measure(
            "iterations",
            "iter.",
            "iterations in validation",
            lambda run: last(run.iterations()),
            lambda value: f"{value:.1f}",
        ),
        Measure("tokens_per_second", "tokens/s", "tokens/s in training", tokens_per_second, short),
        Measure("steps", "all steps", "steps", lambda run: run.steps or None, whole),
        Measure("minutes", "all minutes", "minutes", lambda run: run.minutes or None, minutes),
    ]
    if unit != "label":
        bits = Measure(
            "bits",
            f"bits/{unit}",
            f"bits per {unit}",
            lambda run: bits_per(run, unit),
            lambda value: f"{value:.3f}",
            True,
            -1,
        )
        return [bits, tokens, *speed]
    return [
        Measure(
            "solved_length",
            "solved",
            f"longest with ≥ {SOLVED:.0%} of sequences right{as_generated}".replace("%", " %"),
            lambda run: solved_length(run, f"{generated}sequence_accuracy"),
            whole,
            of_test=True,
            better=1,
            is_length=True,
        ),
        Measure(
            "sequence_accuracy",
            "seq. %",
            f"% of sequences right at {{length}}{as_generated}",
            accuracy(f"{generated}sequence_accuracy"),
            percent,
            of_test=True,
            better=1,
        ),
        tokens,
        Measure(
            "steps_to_99",
            "steps",
            "steps to 99 % of tokens right",
            steps_to_learn,
            whole,
            better=-1,
        ),
        Measure(
            "minutes_to_99",
            "minutes",
            "minutes to 99 % of tokens right",
            minutes_to_learn,
            minutes,
            better=-1,
        ),
        *speed,
    ]


def at_trained_length(run: Run, name: str) -> float | None:
    """An accuracy at the longest test length up to the trained one; of the last validation if not finished."""
    length = run.trained_length or 0
    if run.finished and run.curve:
        rows = {int(row["length"]): row[name] for row in run.curve if name in row}
        return rows[nearest_length(rows, length)] if rows else None
    return last(run.validated(name.removeprefix("generated_"), length))


def solved_length(run: Run, name: str) -> float | None:
    """The longest test length at which enough sequences are right, 0 if there is none; None before the test."""
    if not (run.finished and run.curve):
        return None
    return max((row["length"] for row in run.curve if row.get(name, 0.0) >= SOLVED), default=0.0)


def bits_per(run: Run, unit: str) -> float | None:
    """Bits per label of the test, or of the last validation."""
    return last(run.series(f"test/bits_per_{unit}")) or last(run.series(f"validation/bits_per_{unit}"))


def steps_to_learn(run: Run) -> float | None:
    """Steps until enough tokens are right in validation at the trained length; None if they never are."""
    series = _learnt(run)
    return float(series.steps[0] + 1) if len(series.steps) else None


def minutes_to_learn(run: Run) -> float | None:
    """Minutes of training until then."""
    series = _learnt(run)
    return float(series.seconds[0]) / 60 if len(series.seconds) else None


def _learnt(run: Run) -> Series:
    """The token accuracy in validation where it is high enough."""
    series = run.validated("token_accuracy", run.trained_length or 0)
    return Series(*(part[series.values >= LEARNT] for part in series))


def tokens_per_second(run: Run) -> float | None:
    """The median over training."""
    values = run.series("train/tokens_per_second").values
    return float(np.median(values)) if len(values) else None


def last(series: Series) -> float | None:
    """The last value of a scalar, None if it has none."""
    return float(series.values[-1]) if len(series.values) else None


def differences(settings: list[dict[str, str]]) -> dict[str, list[str]]:
    """The options that differ, "" where one is absent; those of a class only if they differ where the class is one."""

    def differ(name: str) -> bool:
        parents = [other for other in names if name.startswith(f"{other}.")]
        alike = defaultdict(set)
        for each in settings:
            alike[tuple(each.get(parent) for parent in parents)].add(each.get(name))
        return any(len(values) > 1 for values in alike.values())

    names = dict.fromkeys(name for each in settings for name in each)
    return {name: [each.get(name, "") for each in settings] for name in names if differ(name)}


def _groups(runs: list[Run]) -> list[Group]:
    """The groups of the runs of one task."""
    by_settings = defaultdict(list)
    for run in runs:
        own = tuple(sorted(run.settings.items())) if run.config else str(run.folder)
        by_settings[run.label, own].append(run)
    by_label = defaultdict(list)
    for (label, _), members in by_settings.items():
        by_label[label].append(members)
    groups, drawn = [], defaultdict(int)
    for label in sorted(by_label):
        known = [members for members in by_label[label] if members[0].config]
        unknown = [members for members in by_label[label] if not members[0].config]
        names = list(_distinct(label, [members[0].settings for members in known]))
        names += [f"{label} (configuration unknown: {members[0].folder.name})" for members in unknown]
        for name, members in sorted(zip(names, known + unknown, strict=True), key=lambda pair: pair[0]):
            style = mixer_style(label)
            dash = DASHES[drawn[style] % len(DASHES)]
            drawn[style] += 1
            groups.append(Group(name, style, dash, members, bool(members[0].config)))
    return groups


def _distinct(label: str, settings: list[dict[str, str]]) -> Iterable[str]:
    """A name for each of several settings of the same label: with what they differ in, if they are several."""
    if len(settings) < 2:
        return [label] * len(settings)
    differ = differences(settings)
    ends = [name.rpartition(".")[2] for name in differ]
    short_names = [
        end if ends.count(end) == 1 else ".".join(name.split(".")[-2:]) for name, end in zip(differ, ends, strict=True)
    ]
    names = []
    for index in range(len(settings)):
        parts = [f"{name}={values[index] or '–'}" for name, values in zip(short_names, differ.values(), strict=True)]
        more = [f"and {len(parts) - LABELLED_DIFFERENCES} more"] if len(parts) > LABELLED_DIFFERENCES else []
        names.append(" ".join([label, *parts[:LABELLED_DIFFERENCES], *more]))
    return [name if names.count(name) == 1 else f"{name} #{index + 1}" for index, name in enumerate(names)]


def percent(share: float) -> str:
    """A share in percent, with more digits where one would round it to all."""
    texts = (f"{100 * share:.{digits}f}" for digits in (1, 2, 3))
    return next((text for text in texts if share >= 1 or not text.startswith("100")), "99.999")


def whole(value: float) -> str:
    """A number without decimals."""
    return f"{value:,.0f}"


def minutes(value: float) -> str:
    """Minutes, with as many digits as one cares for."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def short(value: float) -> str:
    """Three digits of a number, in thousands or millions if it is large."""
    for size, name in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:#.3g}".rstrip(".") + name
    return f"{value:.3g}"


def summary(group: Group, measure: Measure) -> tuple[str, str]:
    """What is measured of a group in words, mean and deviation; "–" and "" if nothing is."""
    values = group.values(measure)
    if not values:
        return "–", ""
    if measure.is_length:
        longest = max((row["length"] for run in group.finished for row in run.curve), default=0.0)
        low, middle, high = (
            f"{'≥' if value == longest else ''}{measure.text(value)}"
            for value in (min(values), statistics.median_low(values), max(values))
        )
        return middle, f"({low}–{high})" if low != high else ""
    mean = measure.text(statistics.fmean(values))
    if group.is_provisional and measure.of_test:
        mean += "*"
    missing = f"({len(values)} of {len(group.runs)})" if measure.name.endswith("_to_99") else ""
    missing = "" if len(values) == len(group.runs) else missing
    spread = f"± {measure.text(statistics.stdev(values))}" if len(values) > 1 else ""
    return mean, " ".join(filter(None, (spread, missing)))
