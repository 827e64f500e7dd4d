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

PART = Path(__file__).parents[2] / "configs" / "hardware" / "long_sequences.yaml"
PLACE = f"--trainer.accelerator={'gpu' if GPUS > 1 else 'cpu'}"


@pytest.mark.parametrize(
    ("kind", "ranks", "slices", "options"),
    [
        ("implicit", 2, 2, ("--trainer.callbacks+=FindLearningRate", "--trainer.callbacks.init_args.steps=30")),
        ("one step, random caps", 4, 2, ("--model.recompute=true", "--trainer.accumulate_grad_batches=2")),
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
        (["--model.mixer=DenseMixer"], "trainer: slices is 2, but DenseMixer walks through whole sequences"),
        (["--model.mixer=LSTMMixer"], "trainer: slices is 2, but LSTMMixer walks through whole sequences"),
        (
            ["--model.curriculum.init_args.start=1"],
            "trainer: slices is 2, but the curriculum starts at length 1; it must start at 2 or more",
        ),
        (["--trainer.strategy.init_args.slices=3"], "trainer: Sharded: slices is 3, must divide the 2 processes"),
        (["--trainer.strategy.init_args.slices=0"], "Sharded: slices is 0, must be at least 1"),
        (["--data.batch_size=15", "--trainer.devices=4"], "trainer: batch_size is 15 sequences per step, which"),
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
