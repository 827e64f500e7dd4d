"""A learning rate found before training: the model is trained for some steps while the rate rises from low to
high, and a tenth of the rate at which its loss is lowest,

    rate = argmin loss(rate) / 10,    loss averaged over neighbouring steps,

is what the run then uses. Nothing of the run itself moves: weights, data, curriculum and random numbers stay as they
were, and the optimiser is made with the found rate as if it had been configured.

Source: the range test of Smith 2017 (arXiv 1506.01186).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.seed import isolate_rng
from matplotlib.figure import Figure
from torch.distributed.tensor import DTensor

from fprnn_lightning.figures import BLUE, VERMILION, tidy
from fprnn_lightning.whole_files import write_whole

TENTH = 0.1  # of the rate at which the loss is lowest: there it is about to rise
FEWEST = 10  # steps that say something
FALL = 0.02  # share of the first loss by which it must fall, or nothing has been found
ERRORS = 4.0  # standard errors of an average by which it must fall
WINDOW = 0.1  # share of the steps over which losses are averaged
DIVERGED = 2.0  # times the first loss


class FindLearningRate(Callback):
    """Finds the learning rate and uses it in place of the configured one, which stays if none is found.

    Prints what it has found and writes the curve into the run folder, learning_rate.png, and TensorBoard. The search is
    on the first training batches at the curriculum's first length, without the schedule. A resumed fit keeps the rate
    that was found before.

    Args:
        lowest: rate of the first step.
        highest: rate of the last step; the search ends before where the loss has doubled.
        steps: optimiser steps of the search.

    Raises:
        ValueError: if the rates are not positive and in this order, or there are fewer than 10 steps.
    """

    def __init__(self, lowest: float = 1e-5, highest: float = 1.0, steps: int = 100) -> None:
        if not 0 < lowest < highest:
            raise ValueError(
                f"FindLearningRate: lowest is {lowest:g} and highest {highest:g}, must be above 0 and rise"
            )
        if steps < FEWEST:
            raise ValueError(f"FindLearningRate: steps is {steps}, must be at least {FEWEST}")
        self.lowest = lowest
        self.highest = highest
        self.steps = steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.ckpt_path or trainer.fast_dev_run:
            return
        rates = np.geomspace(self.lowest, self.highest, self.steps)
        with isolate_rng():
            losses = np.array(range_test(trainer, pl_module, rates))
        rates = rates[: len(losses)]
        found = suggest(rates, losses)
        tried = f"after {len(rates)} steps from {rates[0]:.1e} to {rates[-1]:.1e}"
        if found is None:
            self._say(trainer, f"no learning rate found {tried}, it stays {pl_module.learning_rate:.3g}")
        else:
            use(pl_module, found)
            trainer.strategy.setup_optimizers(trainer)  # anew: a schedule holds on to the rate that it was made with
            self._say(trainer, f"learning rate {found:.3g} found {tried}")
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            figure = draw(rates, losses, found)
            path = folder / "learning_rate.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, partial(figure.savefig, format="png", dpi=150))
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_figure("learning_rate", figure, 0)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Says of a resumed fit's rate what its optimiser, out of the same checkpoint, has."""
        use(pl_module, checkpoint["hyper_parameters"]["learning_rate"])

    @staticmethod
    def _say(trainer: Trainer, line: str) -> None:
        if trainer.is_global_zero:
            print(line, flush=True)


def range_test(trainer: Trainer, pl_module: LightningModule, rates: np.ndarray) -> list[float]:
    """The loss before a step at each of the rates, one after the other, up to where it is twice the first.

    Args:
        trainer: says device, precision, clipping, accumulation, and averages over the ranks.
        pl_module: the learner, which is put back as it was.
        rates: learning rates, rising.
    """
    optimizer = pl_module.configure_optimizers()["optimizer"]
    length, parts, losses = pl_module.curriculum.length(0), trainer.accumulate_grad_batches, []
    batches = iter(trainer.datamodule.train_dataloader())
    with put_back(pl_module):
        for rate in rates.tolist():
            total = 0.0
            for part in range(parts):
                batch = [tensor.to(pl_module.device) for tensor in next(batches)]
                with trainer.precision_plugin.forward_context():
                    loss = pl_module.learn(batch, length, goes_on=part > 0).loss / parts
                pl_module.backward(loss)
                total += trainer.strategy.reduce(loss.detach(), reduce_op="mean").item()
            if not total < DIVERGED * (losses or [np.inf])[0]:
                break
            losses.append(total)
            average_gradients(trainer, pl_module)
            for group in optimizer.param_groups:
                group["lr"] = rate
            clip = trainer.gradient_clip_val or 0.0, trainer.gradient_clip_algorithm or "norm"
            trainer.precision_plugin.clip_gradients(optimizer, *clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@contextmanager
def put_back(learner: LightningModule) -> Iterator[None]:
    """Within it a learner trains; afterwards it is as it was."""
    parameters = list(learner.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    training = learner.training
    with ExitStack() as stack:
        for block in learner.model.blocks:
            stack.enter_context(block.mixer.repeatable()())
        learner.train()
        try:
            yield
        finally:
            learner.train(training)
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
                    parameter.grad = None


def average_gradients(trainer: Trainer, learner: LightningModule) -> None:
    """Makes gradients their means over the ranks; where weights are sharded, backward has done so."""
    if trainer.world_size > 1:
        for parameter in learner.parameters():
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                parameter.grad = trainer.strategy.reduce(parameter.grad, reduce_op="mean")


def suggest(rates: np.ndarray, losses: np.ndarray) -> float | None:
    """A tenth of the rate at which the averaged loss is lowest; None if it has not fallen before, beyond its noise."""
    if len(losses) < FEWEST:
        return None
    rates, averaged = average(rates, losses)
    lowest = int(averaged.argmin())
    fall = averaged[: lowest + 1].max() - averaged[lowest]
    noise = np.std(np.diff(losses)) / np.sqrt(2 * window(losses))  # of an average
    return None if fall < max(FALL * losses[0], ERRORS * noise) else float(TENTH * rates[lowest])


def average(rates: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Averages of the losses in a window, and the rates in its middle."""
    size = window(losses)
    return rates[size // 2 : -(size // 2)], np.convolve(losses, np.full(size, 1 / size), "valid")


def window(losses: np.ndarray) -> int:
    """How many losses are averaged: an odd number, at least 3."""
    return 2 * max(1, round(WINDOW * len(losses) / 2)) + 1


def use(pl_module: LightningModule, rate: float) -> None:
    """Makes a rate the learner's, as if it had been configured."""
    pl_module.learning_rate = rate
    pl_module.hparams["learning_rate"] = rate


def draw(rates: np.ndarray, losses: np.ndarray, found: float | None) -> Figure:
    """The losses over the rates, on a logarithmic axis, and what was found."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(rates, losses, ".", color="0.7", label="loss before the step")
    if len(losses) >= FEWEST:
        axes.plot(*average(rates, losses), color=BLUE, label="averaged")
    if found is not None:
        axes.axvline(found, color=VERMILION, label=f"found: {found:.3g}")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    tidy(axes)
    figure.legend(frameon=False, loc="outside upper right", ncols=3)
    return figure
