"""What callbacks decide and say in training, they decide together and say once."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ranks import Ranks
from torch import Tensor, nn

from fprnn_lightning.callbacks import NonFiniteError, NonFiniteGuard, SolverReport, StopWhenSolved
from fprnn_lightning.callbacks.find_learning_rate import range_test
from fprnn_lightning.mixers.fixed_point import FixedPointMixer
from fprnn_lightning.solvers.gradients import Implicit
from fprnn_lightning.tasks.word_problem import WordProblem
from fprnn_lightning.training import FixedLength, SequenceLearner, WarmupConstant


class Search(Callback):
    """Prints the losses of a search for a learning rate."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        losses = range_test(trainer, pl_module, np.geomspace(1e-3, 1e-1, 12))
        print("searched", *losses, flush=True)


class Spoil(Callback):
    """Makes a parameter, or else an activation, of rank 1 infinite after two steps."""

    def __init__(self, parameter: str | None) -> None:
        self.parameter = parameter

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            if self.parameter:
                pl_module.get_parameter(self.parameter).data.view(-1)[0] = torch.inf
            else:
                pl_module.model.embedding.register_forward_hook(self._overflow)

    @staticmethod
    def _overflow(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output * torch.inf


def train(callbacks: list[Callback], gradient: Implicit, steps: int) -> tuple[str, int, dict[str, float]]:
    """What stopped the training of two iterating layers early, after how many steps, and what these ranks log last."""
    torch.manual_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mixer = partial(FixedPointMixer, gradient=gradient, train_iterations=6, evaluation_iterations=6)
    lengths = {"validation_lengths": [4], "test_lengths": [4]}
    learner = SequenceLearner(
        mixer, 2, 8, 2, curriculum=FixedLength(4), schedule=WarmupConstant(2), **{**lengths, "test_lengths": [4, 50]}
    )
    task = WordProblem("Z2", batch_size=16, train_length=4, validation_sequences=6, evaluation_batch_size=4, **lengths)
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"},
        **{"max_steps": steps, "callbacks": callbacks},
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "log_every_n_steps": 1},
        **{"val_check_interval": 2, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0},
    )
    message = ""
    try:
        trainer.fit(learner, task)
    except NonFiniteError as error:
        message = str(error)
    os.environ.pop("PL_GLOBAL_SEED", None)
    return message, trainer.global_step, {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("parameter", "origin"),
    [("model.head.weight", "parameter model.head.weight"), (None, "output of model.embedding")],
)
def test_what_is_not_finite_on_one_rank_stops_all(tmp_path: Path, parameter: str | None, origin: str) -> None:
    ranks = Ranks(train, 2, tmp_path, [Spoil(parameter), NonFiniteGuard()], Implicit(8, 1e-2), 6)
    (first, steps, _), (second, *_) = ranks.results()
    assert first == second
    assert steps == 2
    assert f"at step 2; first not finite: {origin} on rank 1; last good checkpoint" in first


def test_a_solved_run_stops_on_all_ranks(tmp_path: Path) -> None:
    ranks = Ranks(train, 2, tmp_path, [StopWhenSolved(0.01)], Implicit(8, 1e-2), 6)
    assert [steps for _, steps, _ in ranks.results()] == [2, 2]
    assert sum(ranks.output(rank).count("solved after step 2") for rank in (0, 1)) == 1


def test_solver_statistics_are_of_all_ranks_and_a_warning_comes_once(tmp_path: Path) -> None:
    ranks = Ranks(train, 2, tmp_path, [SolverReport()], Implicit(1, 1e-9), 2)
    (_, _, first), (_, _, second) = ranks.results()
    names = [name for name in first if "solver/" in name]
    assert {"solver/layer_1/adjoint_residual", "validation/solver/layer_0/iterations"} <= {*names}
    assert all(first[name] == second[name] for name in names)
    said = "".join(ranks.output(rank) for rank in (0, 1))
    assert said.count("the gradients of 16 of 16 sequences have not converged after 1 iterations in step 1") == 1


def test_a_learning_rate_is_searched_for_together(tmp_path: Path) -> None:
    searched = []
    for ranks in (1, 2):
        together = Ranks(train, ranks, tmp_path / str(ranks), [Search()], Implicit(8, 1e-2), 1)
        together.results()
        for rank in range(ranks):
            (line,) = (line for line in together.output(rank).splitlines() if line.startswith("searched"))
            searched.append([float(loss) for loss in line.split()[1:]])
    one, first, second = searched
    assert len(one) == 12
    assert first == second == pytest.approx(one, rel=1e-5)
