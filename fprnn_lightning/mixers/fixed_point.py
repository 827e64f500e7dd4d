"""The fixed-point mixer: a diagonal pass, repeated on its own output until it is the dense recurrence's.

    y <- core( w + (I - Q)(y - w) ),   gates, w and Q from x_t and, where they depend on the state, normalise(y_{t-1})

One iteration from y = 0 is the diagonal RNN, the limit is `DenseMixer`; both share every equation but this loop. Each
iteration is parallel over time. In evaluation every prefix of every sequence stops for itself, so that no output
depends on the batch, on later tokens or on padding; in training the batch stops when enough of it has converged.

Source: Fixed-Point RNNs (arXiv 2503.10799), equations 5-8.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.cores import Core
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.mixers.recurrent import RecurrentMixer, State, StateDependence, shift
from fprnn_lightning.solvers import GradientRule, Solution, Solver, Stopping, solve
from fprnn_lightning.solvers.base import Function, Measure
from fprnn_lightning.solvers.gradients import Implicit
from fprnn_lightning.solvers.picard import Picard
from fprnn_lightning.solvers.stopping import change_per_sequence, relative


class FixedPointMixer(RecurrentMixer):
    """A diagonal RNN iterated towards the dense one, in parallel over time.

    Args:
        width: channels of the input and of the output.
        expand: channels D of the core per channel of `width`.
        core: makes the core from D.
        channel_mixer: makes the channel mixer from D.
        dependence: which terms read the previous state.
        solver: makes the next iterate.
        stopping: tolerance, and the share of a training batch that must have converged.
        train_iterations: the most iterations in training.
        evaluation_iterations: the most iterations in evaluation.
        gradient: what backpropagation sees of the iteration.
        convolution: tokens that a causal convolution before the core sees (4 in Mamba); 0 leaves it out.

    Raises:
        ValueError: if a number of iterations is less than 1.
    """

    def __init__(
        self,
        width: int,
        expand: float = 2.0,
        core: Callable[[int], Core] = GatedDiagonal,
        channel_mixer: Callable[[int], ChannelMixer] = Householder,
        dependence: StateDependence = StateDependence(),
        solver: Solver = Picard(),
        stopping: Stopping = Stopping(),
        train_iterations: int = 32,
        evaluation_iterations: int = 64,
        gradient: GradientRule = Implicit(),
        convolution: int = 0,
    ) -> None:
        super().__init__(width, expand, core, channel_mixer, dependence, convolution)
        for name, cap in (("train", train_iterations), ("evaluation", evaluation_iterations)):
            if cap < 1:
                raise ValueError(f"FixedPointMixer: {name}_iterations is {cap}, must be at least 1")
        self.solver = solver
        self.stopping = stopping
        self.train_iterations = train_iterations
        self.evaluation_iterations = evaluation_iterations
        self.gradient = gradient
        self._report: dict[str, Tensor] = {}

    def states(self, x: Tensor, raw: Tensor) -> Tensor:
        known_q = known = None  # what reads x alone
        if not self.dependence.channel_mixer:
            known_q = self.channel_mixer.coefficients(self.terms(raw, None)[1])
        if not self.terms.reads_feedback:
            known = self.gates_and_mixing(x, raw, None, known_q)

        def iterate(y: Tensor) -> Tensor:
            gates, q = known or self.gates_and_mixing(x, raw, shift(self.seen(y, x)), known_q)
            return self.core.sequence_pass(gates, self.residual(gates, q, y))[0]

        measure = change_per_sequence if self.training else _change_per_prefix
        solution = self._solve(iterate, torch.zeros_like(x), measure)
        self._report = {
            name: items if items.dim() == 1 else items[:, -1]  # of all prefixes, that of the whole sequence
            for name, items in (
                ("iterations", solution.steps),
                ("residual", solution.residual),
                ("converged", solution.converged),
            )
        }
        return solution.value

    def next_y(self, gates: Any, q: Any, state: State) -> Tensor:
        offset, gain = self.core.token_pass(gates, state.carry)

        def iterate(y: Tensor) -> Tensor:
            return offset + gain * self.residual(gates, q, y)

        return self._solve(iterate, state.y, change_per_sequence).value

    def diagnostics(self) -> dict[str, Tensor]:
        return self._report

    def _solve(self, iterate: Function, initial: Tensor, measure: Measure) -> Solution:
        find = partial(
            solve, solver=self.solver, stopping=self.stopping, independent=not self.training, measure=measure
        )
        iterations = self.train_iterations if self.training else self.evaluation_iterations
        if torch.is_grad_enabled():
            return self.gradient.differentiate(find, iterate, initial, iterations)
        return find(iterate, initial, iterations=iterations)


def _change_per_prefix(change: Tensor, value: Tensor) -> Tensor:
    """The largest relative change of a token in each prefix of each sequence: two (B, T, D) -> (B, T)."""
    return relative(change.abs().amax(-1), value.abs().amax(-1)).cummax(1).values
