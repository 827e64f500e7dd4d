"""Ranks on machines that differ, in what they are told or in what files they see, do not train together."""

from pathlib import Path

import pytest
from ranks import Ranks, two_machines
from small_runs import fit, table

from fprnn_lightning.cli import main


def fit_in(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    return fit("copying", folder)


def start_two_machines(folder: Path, *options: tuple[str, ...]) -> list[Ranks]:
    """One process of a run on each of two machines, with a folder and options of their own."""
    many = ["--trainer.accelerator=cpu", "--trainer.strategy=ddp", "--trainer.num_nodes=2"]
    return two_machines(lambda own: [*fit_in(own), *many, *options[int(own.name)]], folder)


def assert_told(nodes: list[Ranks], sentence: str) -> None:
    assert [node.wait() for node in nodes] == [[2], [2]]
    for node in nodes:
        (told,) = (line for line in node.output(0).splitlines() if line.startswith("error: "))
        assert told == f"error: {sentence}"
        assert "Traceback" not in node.output(0)


@pytest.mark.parametrize("option", ["model.learning_rate=0.5", "trainer.accumulate_grad_batches=2"])
def test_with_other_options(tmp_path: Path, option: str) -> None:
    nodes = start_two_machines(tmp_path, (), (f"--{option}",))
    name = option.partition("=")[0]
    assert_told(nodes, f"process 1 of this run has another {name} than process 0, start all with the same")
    assert not list(tmp_path.glob("*/logs/*/*/run_*"))


def test_where_one_does_not_see_the_run_that_goes_on(tmp_path: Path) -> None:
    """Each has files of its own: the first machine those of a run that is not over, the second none."""
    alone = Ranks(main, 1, tmp_path / "0", [*fit_in(tmp_path / "0"), "--trainer.accelerator=cpu"])
    assert alone.results() == [0]
    (run,) = (tmp_path / "0").glob("logs/*/*/run_0")
    (run / "length_curve.csv").unlink()
    before = table(run)
    nodes = start_two_machines(tmp_path, ("--resume=auto",), ("--resume=auto",))
    assert_told(
        nodes,
        "process 0 of this run starts from step 20 of logs/copying/lstm/run_0, process 1 from step 0; all machines "
        "must see the same files",
    )
    assert table(run) == before
