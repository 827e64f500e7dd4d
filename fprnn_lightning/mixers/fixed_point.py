"""The fixed-point mixer: a diagonal pass, repeated on its own output until it is the dense recurrence's.

    y <- core( w + (I - Q)(y - w) ),   gates, w and Q from x_t and, where they depend on the state, normalise(y_{t-1})

One iteration from y = 0 is the diagonal RNN, the limit is `DenseMixer`; both share every equation but this loop. Each
iteration is parallel over time. In evaluation every prefix of every sequence stops for itself, so that no output
depends on the batch, on later tokens or on padding; in training the batch stops when enough of it has converged, after
`decide_jointly` on all ranks together, but each accumulated batch for itself, so that accumulation changes what comes
out to the solver's tolerance. Within `context_parallel`, both are decided for the sequences of which there are slices,
and what diagnostics tell of an evaluation is of the prefixes that end with the slice.

Source: Fixed-Point RNNs (arXiv 2503.10799), equations 5-8.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fprnn_lightning.channel_mixers import ChannelMixer
from fprnn_lightning.channel_mixers.householder import Householder
from fprnn_lightning.cores import Core
from fprnn_lightning.cores.gated_diagonal import GatedDiagonal
from fprnn_lightning.mixers.base import Cost, Iteration
from fprnn_lightning.mixers.fused_step import FusedStep, fused_step
from fprnn_lightning.mixers.recurrent import RecurrentMixer, State, StateDependence, feedback
from fprnn_lightning.mixers.sliced_items import sliced_items
from fprnn_lightning.scan.context_parallel import slices_in_use
from fprnn_lightning.solvers import GradientRule, Solution, Solver, Stopping, solve
from fprnn_lightning.solvers.base import Function
from fprnn_lightning.solvers.caps import Draws, IterationCap
from fprnn_lightning.solvers.gradients import Implicit
from fprnn_lightning.solvers.items import PREFIXES, SEQUENCES, Items, change_of_tokens
from fprnn_lightning.solvers.picard import Picard
from fprnn_lightning.solvers.stopping import Share, share_here, share_on_all_ranks

Report = dict[str, Tensor]  # each (B,): iterations, residual and converged, and of the gradient's solve as adjoint_...


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
        train_iterations: the most iterations in training, or what sets them batch by batch. Batches accumulated for
            one optimiser step count as one where `go_on_with_step` tells of them, as the trainer does.
        evaluation_iterations: the most iterations in evaluation, and in `step`; not random.
        gradient: what backpropagation sees of the iteration.
        convolution: tokens that a causal convolution before the core sees (4 in Mamba); 0 leaves it out.
        warm_start: whether the iteration on a training batch starts from the states of the previous one, if that had
            the same shape, rather than from 0; of accumulated batches each starts from the one before it. They are not
            in a checkpoint, so a resumed run then agrees with one that was never stopped, and one with accumulation
            with one without, to the solver's tolerance only. Evaluation always starts from 0, `step` always from the
            previous token's state.

    Raises:
        ValueError: if a number of iterations is less than 1, or evaluation's is random.
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
        train_iterations: IterationCap | int = 32,
        evaluation_iterations: IterationCap | int = 64,
        gradient: GradientRule = Implicit(),
        convolution: int = 0,
        warm_start: bool = False,
    ) -> None:
        super().__init__(width, expand, core, channel_mixer, dependence, convolution)
        for name, cap in (("train", train_iterations), ("evaluation", evaluation_iterations)):
            if isinstance(cap, int) and cap < 1:
                raise ValueError(f"FixedPointMixer: {name}_iterations is {cap}, must be at least 1")
        if _is_random(evaluation_iterations):
            name = type(evaluation_iterations).__name__
            raise ValueError(f"FixedPointMixer: evaluation_iterations is a {name}, which is for training only")
        self.solver = solver
        self.stopping = stopping
        self.train_iterations = train_iterations
        self.evaluation_iterations = evaluation_iterations
        self.gradient = gradient
        self.warm_start = warm_start
        self.draws = Draws() if _is_random(train_iterations) else None
        self._previous = torch.empty(0)  # the states of the last training batch if starts are warm, else never any
        self._report: Report = {}
        self.share: Share = share_here

    def decide_jointly(self) -> None:
        """An iteration on a training batch stops when the share of all ranks' sequences has converged."""
        self.share = share_on_all_ranks

    def go_on_with_step(self) -> None:
        if self.draws:
            self.draws.again()

    def describe(self) -> dict[str, str | int | float]:
        cap = self.train_iterations
        return {
            **super().describe(),
            "solver": type(self.solver).__name__,
            "iterations": cap if isinstance(cap, int) else repr(cap),
            "gradient": type(self.gradient).__name__,
        }

    def cost(self, time: int) -> Cost:
        once, each = self.projection_flops(), self.read_flops() + self.channel_mixer.residual_flops()
        coefficients = self.channel_mixer.coefficients_flops()
        if self._q_reads_the_state():
            each += coefficients
        else:
            once += coefficients
        return Cost(once, each + self.core.flops(), self._typical_iterations(time))

    @torch.compiler.disable(reason="a loop whose end is decided as it runs")
    def states(self, x: Tensor, raw: Tensor) -> Tensor:
        zeros = torch.zeros_like(x)
        sequences, prefixes, time = SEQUENCES, PREFIXES, x.shape[1]
        slices = slices_in_use()
        if slices is not None:
            sequences, prefixes, time = sliced_items(slices, x)
        items = sequences if self.training else prefixes
        fused = fused_step(self, self.solver, x, raw, zeros, items)
        return self._solve_sequences(self._iterate(x, raw), fused, zeros, items, sequences, time)

    def _iterate(self, x: Tensor, raw: Tensor) -> Function:
        """The function f of the states of whole sequences."""
        known_q = known = None  # what reads x alone, or nothing
        if not self._q_reads_the_state():
            known_q = self.channel_mixer.coefficients(self.terms(raw, None)[1])
        if not self.terms.reads_feedback:
            known = self.gates_and_mixing(x, raw, None, known_q)

        def iterate(y: Tensor) -> Tensor:
            gates, q = known or self.gates_and_mixing(x, raw, feedback(self.seen(y, x)), known_q)
            return self.core.sequence_pass(gates, self.residual(gates, q, y))[0]

        return iterate

    def _q_reads_the_state(self) -> bool:
        return self.dependence.channel_mixer and self.channel_mixer.raw_channels > 0

    def _typical_iterations(self, time: int) -> float:
        cap = self.train_iterations
        return float(cap) if isinstance(cap, int) else cap.typical(time)

    def observed_states(self, x: Tensor, raw: Tensor) -> tuple[Tensor, Iteration]:
        """Nothing settles before everything has, so that all of the iteration is seen."""
        residuals, time = [], x.shape[1]

        def measure(y: Tensor, f_y: Tensor) -> Tensor:
            residuals.append(change_of_tokens(y, f_y))
            return residuals[-1].cummax(1).values

        stopping = replace(self.stopping, share=1.0)
        iterations = _iterations(self.evaluation_iterations, time)
        options = {"items": PREFIXES, "measure": measure}
        found = solve(self._iterate(x, raw), torch.zeros_like(x), self.solver, stopping, iterations, **options)
        typical = self._typical_iterations(time)
        return found.value, Iteration(torch.stack(residuals), self.stopping.tolerance, typical)

    def next_y(self, gates: Any, q: Any, state: State) -> Tensor:
        offset, gain = self.core.token_pass(gates, state.carry)

        def iterate(y: Tensor) -> Tensor:
            return offset + gain * self.residual(gates, q, y)

        return self._solve(iterate, state.y, SEQUENCES, _iterations(self.evaluation_iterations, time=1), {})

    def diagnostics(self) -> dict[str, Tensor]:
        return self._report

    def repeatable(self) -> Callable[[], AbstractContextManager[None]]:
        """With the same draw, from the same start, on the same slices."""
        before, sliced = self._memory(), super().repeatable()

        @contextmanager
        def again() -> Iterator[None]:
            after = self._memory()
            self._remember(*before)
            try:
                with sliced():
                    yield
            finally:
                self._remember(*after)

        return again

    def _memory(self) -> tuple[int, Tensor]:
        return self.draws.count if self.draws else 0, self._previous

    def _remember(self, count: int, previous: Tensor) -> None:
        self._previous = previous
        if self.draws:
            self.draws.count = count

    def _solve_sequences(
        self, iterate: Function, fused: FusedStep | None, zeros: Tensor, items: Items, adjoint_items: Items, time: int
    ) -> Tensor:
        """The y = iterate(y) of sequences of so many tokens or a slice of them, shaped like the zeros (B, T, D)."""
        self._report = {}
        if not self.training:
            iterations = _iterations(self.evaluation_iterations, time)
            return self._solve(iterate, zeros, items, iterations, self._report, fused, adjoint_items)
        iterations = _iterations(self.train_iterations, time, self.draws.next() if self.draws else 0)
        initial = self._previous.to(zeros) if self._previous.shape == zeros.shape else zeros
        y = self._solve(iterate, initial, items, iterations, self._report, fused, adjoint_items)
        if self.warm_start:
            self._previous = y.detach().nan_to_num(0, 0, 0)  # or one overflow would spoil all batches to come
        return y

    def _solve(
        self,
        iterate: Function,
        initial: Tensor,
        items: Items,
        iterations: int,
        report: Report,
        fused: FusedStep | None = None,
        adjoint_items: Items = SEQUENCES,
    ) -> Tensor:
        """The states, with their gradient; `report` is told of this solve and later of that of the gradient."""

        def find(function: Function, initial: Tensor, iterations: int) -> Solution:
            independent, measure = not self.training, None
            if fused is not None and not torch.is_grad_enabled():
                function, measure = fused, fused.measure
            options = {"independent": independent, "share": self.share, "items": items, "measure": measure}
            return solve(function, initial, self.solver, self.stopping, iterations, **options)

        if torch.is_grad_enabled():
            share = self.share if self.training else share_here

            def solve_adjoint(*adjoint: Any) -> Solution:
                found = solve(*adjoint, items=adjoint_items, share=share)
                _add_to(report, "adjoint_", found)
                return found

            solution = self.gradient.differentiate(find, iterate, initial, iterations, solve_adjoint)
        else:
            solution = find(iterate, initial, iterations=iterations)
        _add_to(report, "", solution)
        return solution.value


def _is_random(cap: int | IterationCap) -> bool:
    return isinstance(cap, IterationCap) and cap.is_random


def _iterations(cap: int | IterationCap, time: int, draw: int = 0) -> int:
    return cap if isinstance(cap, int) else cap.iterations(time, draw)


def _add_to(report: Report, prefix: str, solution: Solution) -> None:
    """What a solution says of itself, of all prefixes of a sequence that of the whole one."""
    parts = {"iterations": solution.steps, "residual": solution.residual, "converged": solution.converged}
    report |= {f"{prefix}{name}": part if part.dim() == 1 else part[:, -1].clone() for name, part in parts.items()}
