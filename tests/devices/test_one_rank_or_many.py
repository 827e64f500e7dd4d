"""A run on several ranks, or with accumulated batches, is that on one rank, to rounding."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from small_runs import COPYING, KINDS, difference, table

EXACT = ("train/length", "train/learning_rate", "train/token_accuracy", "train/last_token_accuracy")
COUNTED = tuple(f"solver/layer_{layer}/{name}" for layer in (0, 1) for name in ("iterations", "converged"))


def assert_same_trace(ours: Path, theirs: Path) -> None:
    assert difference(ours, theirs, *EXACT) < 1e-6
    assert difference(ours, theirs, "train/loss") < 1e-5
    assert difference(ours, theirs, "train/gradient_norm", "validation/loss") < 1e-4


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *((kind, 2) for kind in KINDS),
        *(pytest.param(kind, 4, marks=[pytest.mark.slow] * ("FixedPoint" in str(KINDS[kind]))) for kind in KINDS),
    ],
)
def test_ranks_change_nothing_but_rounding(run: Callable[..., Path], kind: str, ranks: int) -> None:
    one, many = run(kind, 1), run(kind, ranks)
    assert_same_trace(many, one)
    lengths = {value for (name, _), value in table(one).items() if name == "train/length"}
    assert len(lengths) > 1 or KINDS[kind]["data"] is COPYING, "else the curriculum says little"
    assert all(math.isfinite(value) for (name, _), value in table(one).items() if name == "train/loss")
    if "FixedPointMixer" in str(KINDS[kind]):
        assert difference(many, one, *COUNTED) < 1e-6
        if kind == "implicit":
            adjoint = "solver/layer_0/adjoint_iterations", "solver/layer_0/adjoint_converged"
            assert difference(many, one, *adjoint) < 1e-6
            assert len({value for (name, _), value in table(one).items() if name == adjoint[0]}) > 1
        iterations = {value for (name, _), value in table(one).items() if name == COUNTED[0]}
        assert len(iterations) > 1, "else it never stopped early"
    assert (many / "length_curve.csv").read_text().count("\n") == (one / "length_curve.csv").read_text().count("\n")


@pytest.mark.parametrize(
    ("kind", "ranks", "accumulated"),
    [
        *(("copying", 1, 4), ("copying", 2, 2), ("one step, random caps", 1, 2)),
        pytest.param("one step, random caps", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_accumulation_changes_nothing_but_rounding(
    run: Callable[..., Path], kind: str, ranks: int, accumulated: int
) -> None:
    many = run(kind, ranks, f"--trainer.accumulate_grad_batches={accumulated}")
    assert table(many).keys() == table(run(kind, 1)).keys()
    assert_same_trace(many, run(kind, 1))


@pytest.mark.parametrize(("before", "after"), [(1, 4), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_random_caps_go_on_with_another_accumulation(run: Callable[..., Path], before: int, after: int) -> None:
    kind, accumulate = "one step, random caps", "--trainer.accumulate_grad_batches="
    half = run(kind, 1, f"{accumulate}{before}", "--trainer.max_steps=10")
    resumed, straight = run(kind, 1, f"{accumulate}{after}", f"--ckpt_path={half / 'last.ckpt'}"), table(run(kind, 1))
    losses = {key: value for key, value in table(resumed).items() if key[0] == "train/loss"}
    assert len(losses) == 10
    assert losses == pytest.approx({key: straight[key] for key in losses}, rel=1e-5)


def test_an_iteration_stops_for_each_accumulated_batch_on_all_ranks_at_once(run: Callable[..., Path]) -> None:
    accumulated = "--trainer.accumulate_grad_batches=2"
    assert_same_trace(run("implicit", 2, accumulated), run("implicit", 1, accumulated))
