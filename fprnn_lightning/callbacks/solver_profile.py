"""What the iteration of every layer does on a few sequences of each validation and test, as figures: the residual
against the iteration, and over iteration and position; the distribution of the decays; and by how much an iteration
contracts. Layers that do not iterate show what they have of it.
"""

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor

from fprnn_lightning.figures import BLUE, GREEN, GREY, ORANGE, tidy
from fprnn_lightning.mixers.base import Iteration, Profile

SEQUENCES = 4  # of the first batch
BINS = np.linspace(0, 1, 51)
SMALLEST = 1e-8  # residual that is drawn


class SolverProfile(Callback):
    """Shows, of layer i in a validation (and likewise in a test), below `validation/solver/layer_<i>/`

    `residual_by_iteration` and `residual_by_position` (figures), `decay` (histogram), `contraction` and
    `contraction_bound` (the largest over the tokens of ||diag(gain) (I - Q)|| and of a bound on it).
    """

    def __init__(self) -> None:
        self.tokens = torch.empty(0)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: None, batch: list[Tensor], batch_idx: int, *_: int
    ) -> None:
        self._keep(batch, batch_idx)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: None, batch: list[Tensor], batch_idx: int, *_: int
    ) -> None:
        self._keep(batch, batch_idx)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._show(trainer, pl_module, "validation")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module, "test")

    def _keep(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 0:
            self.tokens = batch[0][:SEQUENCES]

    def _show(self, trainer: Trainer, pl_module: LightningModule, split: str) -> None:
        with trainer.precision_plugin.forward_context():
            profiles = pl_module.model.profile(self.tokens)
        self.tokens = torch.empty(0)
        for layer, profile in enumerate(profiles):
            if profile is not None:
                prefix = f"{split}/solver/layer_{layer}"
                if profile.contraction is not None and trainer.is_global_zero:  # whose batch is the first of the set
                    factors = {"contraction": profile.contraction, "contraction_bound": profile.contraction_bound}
                    largest = {f"{prefix}/{name}": factor.max() for name, factor in factors.items()}
                    pl_module.log_dict(largest, rank_zero_only=True, sync_dist=True)  # both, or Lightning warns
                if trainer.is_global_zero:
                    _write(trainer, profile, prefix)


def _write(trainer: Trainer, profile: Profile, prefix: str) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            board = logger.experiment
            step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning has it for scalars
            decays = profile.decays.float().cpu().numpy()
            if np.isfinite(decays).all():
                board.add_histogram(f"{prefix}/decay", decays, step, bins=BINS)
            if profile.iteration is not None:
                title = f"{prefix.replace('/', ' · ')} · step {trainer.global_step:,}"
                board.add_figure(f"{prefix}/residual_by_iteration", draw_iterations(profile.iteration, title), step)
                board.add_figure(f"{prefix}/residual_by_position", draw_positions(profile, title), step)


def draw_iterations(iteration: Iteration, title: str) -> Figure:
    """The relative change of all tokens against the iteration: median, the middle 80 % and the largest."""
    residuals = _drawable(iteration.residuals).flatten(1).numpy()
    figure = Figure(figsize=(7, 4.2), dpi=110)
    axes = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.97, "bottom": 0.12, "top": 0.93})
    iterations = np.arange(1, len(residuals) + 1)
    low, median, high = np.quantile(residuals, (0.1, 0.5, 0.9), axis=1)
    axes.fill_between(iterations, low, high, color=BLUE, alpha=0.2, linewidth=0, label="10 to 90 % of the tokens")
    axes.plot(iterations, median, color=BLUE, label="median")
    axes.plot(iterations, residuals.max(1), color=ORANGE, linestyle="--", label="largest")
    axes.set_yscale("log")
    if iteration.tolerance > 0:
        axes.axhline(iteration.tolerance, color=GREY, linestyle=":", label=f"tolerance {iteration.tolerance:g}")
    if iteration.training_iterations <= len(residuals):
        most = iteration.training_iterations
        axes.axvline(most, color=GREY, linestyle="-.", linewidth=1, label=f"cap in training: {most:g}")
    axes.set_xlim(1, max(2, len(residuals)))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("iteration")
    axes.set_ylabel("relative change of a token, $|f(y) - y|\\;/\\;|f(y)|$")
    tidy(axes)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.legend(fontsize="small", framealpha=0.85, edgecolor="none")
    return figure


def draw_positions(profile: Profile, title: str) -> Figure:
    """The largest relative change among the sequences over iteration and position, and the contraction by position."""
    tolerance = profile.iteration.tolerance
    residuals = _drawable(profile.iteration.residuals).amax(1).numpy()  # iterations, positions
    iterations, positions = residuals.shape
    figure = Figure(figsize=(7, 5.4), dpi=110)
    margins = {"left": 0.11, "right": 0.87, "bottom": 0.1, "top": 0.95, "hspace": 0.08, "wspace": 0.04}
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1), width_ratios=(30, 1), **margins)
    axes = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0], sharex=axes)
    axes.tick_params(labelbottom=False)
    image = axes.imshow(
        residuals,
        norm=LogNorm(tolerance / 10 if 0 < tolerance < 1 else SMALLEST, 1.0),
        cmap="cividis",
        aspect="auto",
        interpolation="nearest",
        origin="lower",
        extent=(0.5, positions + 0.5, 0.5, iterations + 0.5),
    )
    label = f"relative change, the largest of {profile.iteration.residuals.shape[1]} sequences"
    figure.colorbar(image, cax=figure.add_subplot(grid[0, 1]), extend="both", label=label)
    _draw_settled(axes, residuals, tolerance)
    axes.set_ylabel("iteration")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title(title, loc="left", fontsize="medium")
    at, top = np.arange(1, positions + 1), 1.1
    for factor, name, colour, style in (
        (profile.contraction_bound, "bound", GREY, ":"),
        (profile.contraction, "estimate", GREEN, "-"),
    ):
        largest = factor.float().amax(0).cpu().numpy()
        below.plot(at, largest, style, color=colour, label=name)
        top = np.max(largest, initial=top, where=np.isfinite(largest))
    below.axhline(1, color="black", linewidth=0.8)
    below.set_ylim(0, 1.3 * top)
    below.set_xlabel("position in tokens")
    below.set_ylabel("contraction\n‖gain (I − Q)‖")
    below.spines[["top", "right"]].set_visible(False)
    below.legend(frameon=False, fontsize="small", loc="upper right", ncols=2, borderaxespad=0)
    return figure


def _draw_settled(axes: Axes, residuals: np.ndarray, tolerance: float) -> None:
    """A line above the last iteration of every position whose change was not below the tolerance."""
    unsettled = residuals >= tolerance
    last = np.where(unsettled.any(0), len(residuals) - unsettled[::-1].argmax(0), 0)
    edges = np.arange(residuals.shape[1] + 1) + 0.5
    axes.stairs(last + 0.5, edges, baseline=None, color="white", linewidth=1.5, label=f"below {tolerance:g} from here")
    legend = axes.legend(loc="upper left", fontsize="small", facecolor="0.3", framealpha=0.8, edgecolor="none")
    for text in legend.get_texts():
        text.set_color("white")


def _drawable(residuals: Tensor) -> Tensor:
    """On the host, finite and above 0, as a logarithmic axis needs."""
    return residuals.float().cpu().nan_to_num(1 / SMALLEST, 1 / SMALLEST).clamp(SMALLEST, 1 / SMALLEST)
