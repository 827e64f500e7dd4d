"""Evaluation and predictions of a checkpoint are the same on any number of ranks, to all digits."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import command_line
from small_runs import fit, table


def evaluate(subcommand: str, kind: str, checkpoint: Path, ranks: int, folder: Path, *options: str) -> Path:
    """The folder of what is done with a checkpoint."""
    before = set(checkpoint.parent.glob(f"{subcommand}_*"))
    folder.mkdir()
    arguments = [subcommand, *fit(kind, folder)[1:], f"--ckpt_path={checkpoint}", *options]
    assert set(command_line(arguments, ranks, folder).results()) == {0}
    (made,) = set(checkpoint.parent.glob(f"{subcommand}_*")) - before
    return made


@pytest.mark.parametrize(
    ("kind", "subcommand", "many", "options"),
    [
        ("implicit", "test", (3,), ["--data.test_sequences=7", "--data.evaluation_batch_size=2"]),  # 4 batches
        ("copying", "test", (2, 4), ["--data.test_sequences=3", "--data.evaluation_batch_size=2"]),  # 2 batches
        (
            "copying",
            "validate",
            (4,),
            ["--data.validation_sequences=31", "--data.evaluation_batch_size=6"],
        ),  # 6 batches
    ],
)
def test_measures_are_the_same_to_all_digits(
    run: Callable[..., Path], tmp_path: Path, kind: str, subcommand: str, many: tuple[int, ...], options: list[str]
) -> None:
    checkpoint = run(kind, 1) / "last.ckpt"
    one, *others = (
        evaluate(subcommand, kind, checkpoint, ranks, tmp_path / str(ranks), *options) for ranks in (1, *many)
    )
    assert len(table(one)) >= 8
    for other in others:
        assert repr(table(other)) == repr(table(one))  # nan is nan
        if subcommand == "test":
            assert (other / "length_curve.csv").read_bytes() == (one / "length_curve.csv").read_bytes()


def test_predictions_are_in_the_order_of_the_test_set(run: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint, options = (
        run("implicit", 1) / "last.ckpt",
        ["--data.test_sequences=7", "--data.evaluation_batch_size=2"],
    )
    one, many = (
        evaluate("predict", "implicit", checkpoint, ranks, tmp_path / str(ranks), *options) for ranks in (1, 3)
    )
    assert (one / "predictions.csv").read_text().count("\n") == 1 + 7
    assert (many / "predictions.csv").read_bytes() == (one / "predictions.csv").read_bytes()
