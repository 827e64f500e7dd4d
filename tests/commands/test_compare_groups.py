"""Groups of runs and what is measured of them."""

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from fprnn_lightning.commands.groups import Group, Section, differences, percent, sections, short, summary
from fprnn_lightning.commands.runs import find_runs, read_run
from fprnn_lightning.figures import mixer_style

MakeRun = Callable[..., Path]
LSTM = {"class_path": "LSTMMixer", "init_args": {"expand": 2.0}}
DENSE = {"class_path": "DenseMixer", "init_args": {"core": {"class_path": "GatedDiagonal"}}}


def fixed_point(**arguments: object) -> dict:
    return {"class_path": "FixedPointMixer", "init_args": {"core": {"class_path": "GatedDiagonal"}, **arguments}}


def compared(folder: Path) -> list[Section]:
    return sections([read_run(run) for run in find_runs([folder])])


def measured(section: Section, group: Group) -> dict[str, tuple[str, str]]:
    return {measure.name: summary(group, measure) for measure in section.measures}


def test_runs_that_differ_in_their_seed_are_a_group_with_mean_and_deviation(tmp_path: Path, make_run: MakeRun) -> None:
    for seed, accuracy in enumerate((0.7, 0.8, 0.9)):
        make_run(tmp_path / f"run_{seed}", seed=seed, curve={16: accuracy, 50: 0.0}, validation={200 * (seed + 1): 1.0})
    (section,) = compared(tmp_path)
    (group,) = section.groups
    assert (section.task, group.label, len(group.runs)) == ("a5", "lstm", 3)
    values = measured(section, group)
    assert values["sequence_accuracy"] == ("80.0", "± 10.0")
    assert values["steps_to_99"] == ("400", "± 200")
    assert values["minutes_to_99"] == ("0.67", f"± {statistics.stdev([1 / 3, 2 / 3, 1]):.2f}")
    assert values["solved_length"] == ("0", "(0–16)")
    assert values["tokens_per_second"] == ("5.40k", "± 200")
    assert "iterations" not in values


def test_one_run_has_no_deviation(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "run_0")
    (section,) = compared(tmp_path)
    assert {spread for _, spread in measured(section, section.groups[0]).values()} == {""}


def test_the_longest_solved_length(tmp_path: Path, make_run: MakeRun) -> None:
    curves = [{16: 1.0, 50: 0.9, 128: 0.89}, {16: 1.0, 50: 1.0, 128: 1.0}, {16: 0.5, 50: 0.95, 128: 0.0}]
    for seed, curve in enumerate(curves):
        make_run(tmp_path / f"run_{seed}", seed=seed, curve=curve)
    (section,) = compared(tmp_path)
    assert measured(section, section.groups[0])["solved_length"] == ("50", "(50–≥128)")


def test_steps_to_99_of_the_runs_that_get_there(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "run_0", seed=0, validation={200: 0.5, 400: 0.991, 600: 0.2})
    make_run(tmp_path / "run_1", seed=1, validation={200: 0.5, 400: 0.98})
    (section,) = compared(tmp_path)
    assert measured(section, section.groups[0])["steps_to_99"] == ("400", "(1 of 2)")


def test_tests_are_of_finished_runs_where_there_are_any(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "run_0", seed=0, curve={16: 0.8})
    make_run(tmp_path / "run_1", seed=1, finished=False, validation={200: 0.3})
    (section,) = compared(tmp_path)
    values = measured(section, section.groups[0])
    assert values["sequence_accuracy"] == ("80.0", "")
    assert values["steps"] == ("400", "± 283"), "training is of all runs"


def test_a_group_without_a_finished_run_is_provisional_and_comes_last(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "run_0", finished=False, validation={200: 0.9})
    make_run(tmp_path / "run_1", model__mixer=DENSE, curve={16: 0.1})
    (section,) = compared(tmp_path)
    assert [group.is_provisional for group in section.groups] == [False, True]
    values = measured(section, section.groups[1])
    assert values["sequence_accuracy"] == ("90.0*", "")
    assert values["solved_length"] == ("–", "")


def test_the_best_group_is_the_first(tmp_path: Path, make_run: MakeRun) -> None:
    cases = {
        "third": ({16: 0.89, 50: 0.0}, 400),
        "first": ({16: 1.0, 50: 0.9}, 600),
        "second": ({16: 0.99, 50: 0.0}, 600),
        "fifth": ({16: 0.5, 50: 0.5}, 600),
        "fourth": ({16: 0.5, 50: 0.5}, 400),
    }
    for name, (curve, steps) in cases.items():
        make_run(tmp_path / name, curve=curve, validation={steps: 1.0}, model__mixer={"class_path": f"{name}Mixer"})
    (section,) = compared(tmp_path)
    assert [group.label for group in section.groups] == ["first", "second", "third", "fourth", "fifth"]
    assert [measure.name for measure in section.ranking] == [
        *("solved_length", "sequence_accuracy", "token_accuracy", "steps_to_99"),
    ]


def test_groups_of_one_mixer_are_told_apart_by_what_differs(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "run_0", model__mixer=fixed_point(train_iterations=16))
    make_run(tmp_path / "run_1", model__mixer=fixed_point(train_iterations=4))
    make_run(tmp_path / "run_2", seed=1, model__mixer=fixed_point(train_iterations=4))
    make_run(tmp_path / "run_3", model__mixer=DENSE)
    (section,) = compared(tmp_path)
    assert {group.label: len(group.runs) for group in section.groups} == {
        "dense GatedDiagonal": 1,
        "fixed_point GatedDiagonal train_iterations=16": 1,
        "fixed_point GatedDiagonal train_iterations=4": 2,
    }
    twins = [group for group in section.groups if group.label.startswith("fixed_point")]
    assert {group.style for group in twins} == {mixer_style("fixed_point GatedDiagonal")}
    assert len({str(group.dash) for group in twins}) == 2
    assert section.differences() == {
        "model.mixer": ["DenseMixer", "FixedPointMixer", "FixedPointMixer"],
        "model.mixer.train_iterations": ["", "16", "4"],
    }


def test_many_differences_are_cut_short_and_labels_stay_distinct(tmp_path: Path, make_run: MakeRun) -> None:
    for n in range(2):
        arguments = {name: n for name in "abcd"}
        for m in range(2):
            make_run(tmp_path / f"run_{n}_{m}", model__mixer=fixed_point(**arguments), trainer__max_time=m)
    (section,) = compared(tmp_path)
    labels = [group.label for group in section.groups]
    assert len(set(labels)) == 4
    assert all(label.startswith("fixed_point GatedDiagonal max_time=") and "and 2 more" in label for label in labels)


def test_runs_of_unknown_configuration_are_groups_of_their_own(tmp_path: Path, make_run: MakeRun) -> None:
    for n in range(3):
        make_run(tmp_path / "a5" / "lstm" / f"run_{n}", seed=n)
        if n:
            (tmp_path / "a5" / "lstm" / f"run_{n}" / "config.yaml").write_text("seed_everything: 0\n")
    (section,) = compared(tmp_path)
    assert sorted(group.label for group in section.groups) == [
        "lstm",
        "lstm (configuration unknown: run_1)",
        "lstm (configuration unknown: run_2)",
    ]
    assert section.differences() == {}


def test_tasks_are_sections(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "run_0")
    make_run(tmp_path / "run_1", data__init_args={"group": "S3", "train_length": 16})
    make_run(tmp_path / "run_2", data={"class_path": "fprnn_lightning.tasks.ModularArithmetic"})
    assert [section.task for section in compared(tmp_path)] == ["a5", "modular_arithmetic", "s3"]


def test_prompted_tasks_are_measured_as_generated(tmp_path: Path, make_run: MakeRun) -> None:
    data = {"class_path": "Copying", "init_args": {"longest": 16, "train_length": 64}}
    curriculum = {"class_path": "FixedLength", "init_args": {"length": 64}}
    names = ("token_accuracy", "sequence_accuracy", "generated_token_accuracy", "generated_sequence_accuracy")
    folder = make_run(tmp_path / "run_0", names=names, data=data, model__curriculum=curriculum)
    text = (folder / "length_curve.csv").read_text()
    (folder / "length_curve.csv").write_text(text.replace("1.000000,1.000000,64", "0.800000,0.700000,64"))
    (section,) = compared(tmp_path)
    assert (section.task, section.trained_lengths, section.is_prompted) == ("copying", [16], True)
    assert section.sequence_accuracy == "generated_sequence_accuracy"
    values = measured(section, section.groups[0])
    assert values["sequence_accuracy"][0] == "70.0"
    assert values["token_accuracy"][0] == "80.0"
    assert all("as generated" in section.title(measure) for measure in section.ranking if measure.of_test)


def test_text_is_measured_in_bits_per_byte_the_fewest_first(tmp_path: Path, make_run: MakeRun) -> None:
    data = {"class_path": "Text", "init_args": {"train_length": 16}}
    for n, bits in enumerate((2.1, 1.9)):
        extra = [(1100.0, 600, "test/bits_per_byte", bits), (1060.0, 599, "validation/bits_per_byte", 1.5)]
        make_run(tmp_path / f"run_{n}", data=data, extra=extra, model__width=n)
    make_run(tmp_path / "run_2", data=data, extra=extra[1:], model__width=2, finished=False)
    (section,) = compared(tmp_path)
    assert (section.unit, section.sequence_accuracy) == ("byte", "token_accuracy")
    assert [measured(section, group)["bits"][0] for group in section.groups] == ["1.900", "2.100", "1.500*"]
    assert [measure.name for measure in section.ranking] == ["bits", "token_accuracy"]
    assert section.title(section.measures[0]) == "bits per byte"


def test_several_trained_lengths(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "run_0")
    make_run(tmp_path / "run_1", data__init_args={"group": "A5", "train_length": 8}, curve={4: 0.3, 8: 0.4, 16: 0.1})
    (section,) = compared(tmp_path)
    assert section.trained_lengths == [8, 16]
    assert "at trained length" in section.title(section.measures[1])
    assert [measured(section, group)["sequence_accuracy"][0] for group in section.groups] == ["100.0", "40.0"]


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0.0"),
        (0.5, "50.0"),
        (0.995, "99.5"),
        (0.9997, "99.97"),
        (0.99999, "99.999"),
        (0.9999999, "99.999"),
        (1, "100.0"),
    ],
)
def test_what_is_not_all_is_not_rounded_to_all(share: float, text: str) -> None:
    assert percent(share) == text


def test_short_numbers() -> None:
    assert [short(value) for value in (1, 42.0, 999, 5400, 39751, 123456, 1.25e6)] == [
        *("1", "42", "999", "5.40k", "39.8k", "123k", "1.25M"),
    ]


def test_options_of_a_class_differ_only_where_the_class_is_the_same() -> None:
    lstm = {"mixer": "LSTM", "mixer.expand": "2", "width": "32"}
    dense = {"mixer": "Dense", "mixer.expand": "1", "mixer.core": "Gated", "width": "32"}
    assert differences([lstm, dense]) == {"mixer": ["LSTM", "Dense"]}
    assert differences([lstm, dense, {**dense, "mixer.core": "SSM"}]).keys() == {"mixer", "mixer.core"}
    assert differences([lstm]) == {}
