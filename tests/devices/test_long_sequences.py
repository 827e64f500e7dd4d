"""Runs whose training sequences are cut in time over processes are those of one process, to rounding; what cannot be
cut is told before anything starts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import GPUS, Ranks
from small_runs import difference, fit, table
from test_one_rank_or_many import assert_same_trace

from fprnn_lightning.cli import main
from fprnn_lightning.mixers import SequenceMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.sentences import concrete_subclasses

PART = Path(__file__).parents[2] / "configs" / "hardware" / "long_sequences.yaml"
SHORT = "--trainer.max_steps=8", "--trainer.val_check_interval=4"
PLACE = f"--trainer.accelerator={'gpu' if GPUS > 1 else 'cpu'}"


@pytest.mark.parametrize(
    ("kind", "ranks", "slices", "options"),
    [
        ("implicit", 2, 2, ("--trainer.callbacks+=FindLearningRate", "--trainer.callbacks.init_args.steps=30")),
        ("one step, random caps", 4, 2, (*SHORT, "--model.recompute=true", "--trainer.accumulate_grad_batches=2")),
        pytest.param(
            *("last labels", 4, 4, ("--model.mixer=FixedPointMixer", "--model.curriculum.init_args.start=4")),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_slices_change_nothing_but_rounding(
    run: Callable[..., Path], tmp_path: Path, kind: str, ranks: int, slices: int, options: tuple[str, ...]
) -> None:
    if ranks > GPUS > 1:
        pytest.skip(f"needs {ranks} GPUs, here are {GPUS}")
    cut = [f"--config={PART}", f"--trainer.strategy.init_args.slices={slices}", f"--trainer.devices={ranks}", PLACE]
    assert set(Ranks(main, ranks, tmp_path, fit(kind, tmp_path, *cut, *options)).results()) == {0}
    (ours,) = tmp_path.glob("logs/*/*/run_0")
    theirs = run(kind, 1, *options)
    assert_same_trace(ours, theirs)
    assert table(ours).keys() == table(theirs).keys()
    assert difference(ours, theirs, "validation/", "test/token_accuracy") < 1e-3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model.mixer=DenseMixer"], "trainer: slices is 2, but DenseMixer needs whole sequences; give another"),
        (["--model.mixer=LSTMMixer"], "trainer: slices is 2, but LSTMMixer needs whole sequences; give another"),
        (
            ["--model.curriculum.init_args.start=1"],
            "trainer: slices is 2, but the curriculum starts at length 1; it must start at 2 or more",
        ),
        (
            ["--trainer.strategy.init_args.slices=3"],
            "trainer: Sharded: slices is 3, must divide the number of proc",
        ),
        (["--trainer.strategy.init_args.slices=0"], "Sharded: slices is 0, must be at least 1"),
        (
            ["--data.batch_size=15", "--trainer.devices=4"],
            "trainer: batch_size is 15 sequences per step, which cannot be divided among 2 groups of 2 devices",
        ),
    ],
)
def test_what_cannot_be_cut_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, options: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    cut = [f"--config={PART}", "--trainer.devices=2", "--trainer.accelerator=cpu"]
    assert main(fit("implicit", tmp_path, *cut, *options)) == 2
    assert f"error: {sentence}" in capsys.readouterr().err
    assert not list(tmp_path.glob("logs/*/*/*"))


def test_every_process_is_told_at_once(tmp_path: Path) -> None:
    """Also those that the first would let wait."""
    wrong = [f"--config={PART}", "--trainer.devices=2", "--trainer.accelerator=cpu", "--model.mixer=DenseMixer"]
    ranks = Ranks(main, 2, tmp_path, fit("implicit", tmp_path, *wrong))
    assert ranks.wait(40) == [2, 2]
    for rank in (0, 1):
        assert ranks.output(rank).splitlines()[-1].startswith("error: trainer: slices is 2, but DenseMixer needs whole")


@pytest.mark.filterwarnings("ignore:layer 0. .* have not converged")
def test_one_process_tests_what_is_told_to_be_cut(run: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = run("one step, random caps", 1) / "last.ckpt"
    alone = [f"--config={PART}", "--trainer.devices=1", PLACE, f"--ckpt_path={checkpoint}"]
    assert Ranks(main, 1, tmp_path, ["test", *fit("one step, random caps", tmp_path, *alone)[1:]]).results() == [0]


def test_the_mixers_that_can_be_sliced_are_those_tested_so() -> None:
    assert {cls for cls in concrete_subclasses(SequenceMixer) if cls.can_be_sliced} == {DiagonalMixer, FixedPointMixer}
