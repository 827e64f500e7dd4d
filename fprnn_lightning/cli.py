"""The command line, the only file that sees everything: LightningCLI with this project's classes, folders of runs and
checks, and the subcommands beside fit, validate, test and predict.

A run lives in <root>/<task>/<mixer>/run_<n>, root being --trainer.default_root_dir; what is done with a checkpoint goes
into test_<n>, validate_<n> or predict_<n> beside it. Mistakes raise UsageError before anything is trained or written.
`fit --resume` continues a run in its own folder, `fit --ckpt_path` starts a new one from a checkpoint.
"""

import argparse
import csv
import errno
import inspect
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from pydoc import locate
from time import monotonic, sleep
from types import ModuleType
from typing import Any

import torch
import yaml
from jsonargparse import DefaultHelpFormatter, Namespace, auto_cli, set_parsing_settings
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf.errors import OmegaConfBaseException
from torch import distributed

from fprnn_lightning import run_folders
from fprnn_lightning.callbacks import (
    Continuation,
    GradientNorm,
    LengthCurve,
    MetricsFile,
    ModelPage,
    NonFiniteError,
    NonFiniteGuard,
    Progress,
    RunCheckpoint,
    RunTable,
    SameStart,
    SolverProfile,
    SolverReport,
    StartLine,
    StopOnSignal,
    StoppedBySignal,
    Throughput,
)
from fprnn_lightning.commands import bench, compare, data, export, generate
from fprnn_lightning.commands.sweep import sweep
from fprnn_lightning.mixers import SequenceMixer
from fprnn_lightning.mixers.base import snake_case
from fprnn_lightning.pretrained import check_classes, check_weights, read_export
from fprnn_lightning.sentences import (
    SentenceErrors,
    UsageError,
    about_other_processes,
    concrete_subclasses,
    nearest,
    one_line,
    raised_in_union,
)
from fprnn_lightning.tasks import SequenceTask
from fprnn_lightning.tasks.base import share
from fprnn_lightning.training import (
    FixedLength,
    SequenceLearner,
    WholeCheckpoints,
    ending_with_lost_processes,
    read_checkpoint,
)
from fprnn_lightning.whole_files import write_whole

set_parsing_settings(omegaconf_absolute_to_relative_paths=True)  # with omegaconf+: ${...} follows every override

PROGRAM = "python -m fprnn_lightning"
# what the model takes from the task
LINKED = ("vocab_size", "validation_lengths", "test_lengths", "chance", "prompt_overhead", "unit")
TRAINER_DEFAULTS = {
    "default_root_dir": "logs",
    "accelerator": "auto",
    "devices": 1,
    "max_steps": 10_000,
    "gradient_clip_val": 1.0,
    "check_val_every_n_epoch": None,  # training data is one endless epoch
    "val_check_interval": 200,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 10,
    "enable_model_summary": False,
}
PROCESS_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
NAMED = ("best", "last")  # checkpoints of the newest run
PROCESSES_PER_PROCESSOR = 4  # more would only wait for each other
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
UNSUITABLE_ADVICE = (  # of Lightning's, on what is so on purpose
    "Checkpoint directory .* exists and is not empty",
    "You have overridden `on_before_batch_transfer`",
    ".*does not have many workers",
    r".*isinstance\(treespec, LeafSpec\)",
)


class NothingToDo(Exception):
    """What is asked for is there already; the message says where."""


class Parser(SentenceErrors, LightningArgumentParser):
    """LightningCLI's parser; its errors are UsageErrors."""


class FunctionParser(Parser):
    """Parser of a function's options; what else a configuration says about a run is left out."""

    def parse_path(self, path: Any, *args: Any, **options: Any) -> Namespace:
        config = super().parse_path(path, *args, **options)
        for name in vars(config).keys() & {"seed_everything", "trainer", "model", "ckpt_path", "weights_only"}:
            del config[name]
        return config


class PlainHelp(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help with a description that keeps its lines."""


class SaveConfig(Callback):
    """Writes the complete configuration of a fit into its folder; `fit --config` repeats the run from it."""

    def __init__(self, text: str, folder: Path) -> None:
        self.text = text
        self.folder = folder

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        write_whole(self.folder / run_folders.CONFIGURATION, lambda partial: partial.write_text(self.text))


class CommandLine(LightningCLI):
    """fit, validate, test and predict.

    Args:
        arguments: the subcommand and what follows it.
    """

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.checkpoint: dict[str, Any] = {}
        for advice in UNSUITABLE_ADVICE:
            warnings.filterwarnings("ignore", advice)
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_not_advertisement)
        with ExitStack() as self.held:  # the run's folder
            self.held.enter_context(ending_with_lost_processes())
            super().__init__(
                SequenceLearner,
                SequenceTask,
                subclass_mode_data=True,
                parser_class=Parser,
                parser_kwargs={"parser_mode": "omegaconf+", "allow_abbrev": False, "prog": PROGRAM},
                trainer_defaults=TRAINER_DEFAULTS,
                seed_everything_default=0,
                auto_configure_optimizers=False,
                save_config_callback=None,
            )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name in LINKED:
            parser.link_arguments(f"data.{name}", f"model.{name}", apply_on="instantiate")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **options: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **options)
        parser.set_defaults(weights_only=True)  # checkpoints hold plain types and tensors, so nothing else is unpickled
        if subcommand == "test":
            parser.set_defaults(verbose=False)  # the table by length says it better
        if subcommand == "fit":
            parser.add_argument(
                "--resume",
                type=str | None,
                metavar="auto | FOLDER",
                help="continue a run in its folder: auto takes the newest run of the same configuration, and starts "
                "one if there is none; a run's folder takes that run, with its own configuration",
            )
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        given.add_argument("--ckpt_path", nargs="?", type=yaml.safe_load)
        given.add_argument("--resume", nargs="?")
        options = given.parse_known_args(self.arguments)[0]
        base = []
        if options.resume and options.ckpt_path in NAMED:
            raise UsageError(
                f"resume: ckpt_path {options.ckpt_path} is of another run each time, give a checkpoint's path beside it"
            )
        if options.resume not in (None, "auto"):
            if not run_folders.read_configuration(Path(options.resume)):
                raise UsageError(f"resume: {options.resume} is no run's folder, it has no config.yaml that can be read")
            base = ["--config", str(Path(options.resume, run_folders.CONFIGURATION))]
        self.arguments[1:1] = base
        is_known = options.ckpt_path not in NAMED and not (options.resume and not _exists(options.ckpt_path))
        self._parse(options.ckpt_path if is_known else None)

    def _parse_ckpt_path(self) -> None:
        path = self._settings().ckpt_path
        if path in NAMED:
            parts = self._instantiate(partial(self.parser.instantiate_classes, self.config))
            path = run_folders.newest_checkpoint(self._runs(parts[self.config.subcommand].data), path)
            self._parse(str(path))
            self._settings().ckpt_path = str(path)
        elif path and not self.checkpoint and (_exists(path) or not self._settings().get("resume")):
            self._parse(path)  # named in a configuration

    def _parse(self, checkpoint: str | None) -> None:
        """Parses the arguments; what they leave open of the model is taken from the checkpoint, if there is one."""
        subcommand, *options = self.arguments
        if checkpoint:
            self.checkpoint = read_model(checkpoint)
            saved = self.checkpoint.get("hyper_parameters", {})
            saved = {name: value for name, value in saved.items() if name not in LINKED and name[0] != "_"}
            try:
                check_classes(saved)
            except ValueError as error:
                raise UsageError(f"ckpt_path: {checkpoint}: {error}") from error
            options = ["--config", yaml.safe_dump({"model": saved}), *options]
        try:
            self.config = self.parser.parse_args([subcommand, *options])
        except OmegaConfBaseException as error:
            raise UsageError(f"{str(error.full_key).partition('.')[2]}: {str(error).splitlines()[0]}") from error

    def _settings(self) -> Namespace:
        return self.config[self.config.subcommand]

    def instantiate_classes(self) -> None:
        self._instantiate(super().instantiate_classes)

    def _instantiate(self, make: Callable[[], Any]) -> Any:
        """What `make` makes of the configuration; what constructors find wrong is a UsageError."""
        for option, value in self._settings().items(branches=True):
            cls = locate(value.class_path) if isinstance(value, Namespace) and "class_path" in value else None
            if inspect.isabstract(cls):
                known = (each.__name__ for each in concrete_subclasses(cls))
                raise UsageError(f"{option}: {cls.__name__} is abstract, {nearest('', known)}")
        try:
            return make()
        except (ValueError, MisconfigurationException) as error:
            text = str(error)
            while str(error).startswith("Does not validate against any of the Union"):
                error = error.__cause__  # what has been raised of the first member
            if not isinstance(error, (ValueError, MisconfigurationException)):
                raise error
            wrong_type = str(error).startswith("Expected a ")
            raise UsageError(one_line(raised_in_union(text) if wrong_type else error)) from error

    def instantiate_trainer(self, **options: Any) -> Trainer:
        self._check_curriculum()
        configuration = yaml.safe_load(self._parser(self.subcommand).dump(self._settings(), skip_unset=False))
        resume = configuration.pop("resume", None)
        continued = self._continued_run(configuration, resume)
        self._check_checkpoint()
        if self.subcommand != "fit" and not self.checkpoint:
            print(f"no --ckpt_path: {self.subcommand} is of a model that has not been trained", file=sys.stderr)
        settings = self.config_init[self.subcommand].trainer
        self.folder = continued or self._new_folder()
        first_step = self.checkpoint.get("global_step", 0) if continued else None
        callbacks = self._callbacks(settings, configuration, resume == "auto", continued is not None)
        plugins = settings.plugins if isinstance(settings.plugins, list) else [settings.plugins or WholeCheckpoints()]
        if isinstance(settings.val_check_interval, int):  # optimiser steps; Lightning counts batches
            options["val_check_interval"] = settings.val_check_interval * settings.accumulate_grad_batches
        try:
            trainer = super().instantiate_trainer(
                default_root_dir=self.folder,
                logger=self._loggers(first_step) if settings.logger in (None, True) else settings.logger,
                callbacks=callbacks,
                plugins=plugins,
                **options,
            )
            check_devices(trainer)
            check_limits(trainer)
            if self.subcommand == "fit":
                _, shares = share(trainer)
                slices = trainer.world_size // shares
                self.datamodule.check_division(shares, trainer.accumulate_grad_batches, slices)
                self.model.check_slices(slices)
            if trainer.global_rank > 0:  # last, as where the first process has found a mistake it never answers
                reach(trainer)
            return trainer
        except KeyError as error:
            if error.args[0] not in PROCESS_VARIABLES:
                raise
            raise UsageError(f"trainer: the environment variable {error} is missing, torchrun sets it") from error
        except (TypeError, ValueError, RuntimeError, MisconfigurationException) as error:
            raise UsageError(f"trainer: {one_line(error)}") from error

    def _loggers(self, first_step: int | None) -> list[Logger]:
        """TensorBoard's event files and metrics.csv; of a continued run, what is there from a step on is void."""
        events = {"default_hp_metric": False, "purge_step": first_step}
        table = MetricsFile(self.folder, first_step or 0)
        return [TensorBoardLogger(self.folder.parent, "", self.folder.name, **events), table]

    def _callbacks(
        self, settings: Namespace, configuration: dict[str, Any], requeue: bool, is_continued: bool
    ) -> list[Callback]:
        """What every run has, and those of its configuration."""
        text = yaml.safe_dump(configuration, sort_keys=False)
        saves = settings.enable_checkpointing is not False
        saved = self.folder / "last.ckpt" if saves and self.subcommand == "fit" else None
        stop = StopOnSignal(saved, requeue)
        self.held.callback(stop.restore)
        callbacks = [StartLine(), SaveConfig(text, self.folder), stop, Continuation()]
        start = str(self.folder) if is_continued else "", partial(steps_before, self._settings().ckpt_path)
        callbacks += [SameStart(run_folders.options(configuration, run_folders.MACHINES), *start)]
        callbacks += settings.callbacks or []
        callbacks += [Throughput(), GradientNorm(), SolverReport(), NonFiniteGuard(), LengthCurve()]
        callbacks += [ModelPage(text), RunTable(), SolverProfile()]
        if settings.enable_progress_bar is not False:
            callbacks += [Progress()]
        if saves:
            callbacks += [RunCheckpoint(self.folder, "best", is_continued, "validation/loss")]
            callbacks += [RunCheckpoint(self.folder, "last", is_continued)]
        return callbacks

    def _check_curriculum(self) -> None:
        end, available = self.model.curriculum.end, self.datamodule.train_length
        fixed = isinstance(self.model.curriculum, FixedLength) and end == available
        if self.subcommand == "fit" and not (fixed or self.datamodule.prefix_closed):
            raise UsageError(
                f"model.curriculum must be FixedLength with length {available}, which is data.train_length: "
                f"sequences of {type(self.datamodule).__name__} cannot be cut"
            )
        if self.subcommand == "fit" and end > available:
            raise UsageError(
                f"model.curriculum ends at {end} tokens, data.train_length must be as many, is {available}"
            )

    def _check_checkpoint(self) -> None:
        if not self.checkpoint:
            return
        path = self._settings().ckpt_path
        try:
            check_weights(self.checkpoint["state_dict"], self.model.state_dict(), path)
        except ValueError as error:
            raise UsageError(
                f"ckpt_path is of another architecture, {error}; give no model or data options that differ from its own"
            ) from error
        if Path(path).is_dir():  # exported: weights and nothing else
            self.model.load_state_dict(self.checkpoint["state_dict"])
            self.config_init[self.subcommand].ckpt_path = None
        self.checkpoint = {"global_step": self.checkpoint.get("global_step", 0)}  # Lightning reads the file again

    def _runs(self, task: SequenceTask) -> Path:
        """Where the runs of this task and mixer are."""
        settings = self._settings()
        mixer = snake_case(settings.model.mixer.class_path.rpartition(".")[2].removesuffix("Mixer"))
        return Path(settings.trainer.default_root_dir, task.name, mixer)

    def _continued_run(self, configuration: dict[str, Any], resume: str | None) -> Path | None:
        """The folder of the run that this fit continues, with its last checkpoint read; None if the run is new.

        All ranks find the same, a new run having no configuration before all have started; `SameStart` makes sure.
        """
        if not resume:
            return None
        folder = Path(resume)
        if resume == "auto":
            parent = self._runs(self.datamodule)
            folder = run_folders.newest_like(parent, configuration)
            others = [run for run in run_folders.runs(parent) if run_folders.read_configuration(run)]
            if folder is None and others and rank_zero_only.rank == 0:
                different = ", ".join(run_folders.differences(others[0], configuration))
                print(f"no run to go on with: {others[0]} differs in {different}")
        if folder is None:
            if not _exists(self._settings().ckpt_path):
                raise UsageError(f"ckpt_path: file {self._settings().ckpt_path} does not exist")
            return None
        last = folder / "last.ckpt"
        if changed := set(run_folders.differences(folder, configuration)) - {"trainer.max_steps", "trainer.max_time"}:
            raise UsageError(
                f"resume: {folder} has another {' and '.join(sorted(changed))}, leave that as it is, or start a new "
                f"run from its end with --ckpt_path {last}"
            )
        if run_folders.is_finished(folder):
            raise NothingToDo(f"{folder} is finished; --ckpt_path {last} goes on from its end, as a new run")
        if rank_zero_only.rank == 0:
            self.held.enter_context(run_folders.locked(folder))
        if last.exists():
            self.checkpoint = read_checkpoint(last)
            self._settings().ckpt_path = self.config_init[self.subcommand].ckpt_path = str(last)
        return folder

    def _new_folder(self) -> Path:
        path = self._settings().ckpt_path
        if path and self.subcommand != "fit":
            place = Path(path).absolute()
            candidates = run_folders.numbered(place if place.is_dir() else place.parent, self.subcommand)
        else:
            candidates = run_folders.numbered(self._runs(self.datamodule), "run")
        if rank_zero_only.rank > 0:
            return next(folder for folder in candidates if not folder.exists())  # rank 0 writes, into its own
        try:
            folder = run_folders.make_folder(candidates)
        except OSError as error:
            raise UsageError(f"trainer.default_root_dir: cannot make {error.filename}, {error.strerror}") from error
        self.held.callback(run_folders.remove_if_unused, folder)
        self.held.enter_context(run_folders.locked(folder))
        return folder

    def after_fit(self) -> None:
        """Keeps the final weights and measures them, whether the fit ended by its last step or by its schedule."""
        if not self.trainer.fast_dev_run:
            if self.trainer.checkpoint_callbacks:
                self.trainer.save_checkpoint(self.folder / "last.ckpt", weights_only=False)
            self.trainer.test(self.model, self.datamodule, verbose=False)

    def predict(self, **options: Any) -> None:
        """Writes one row per test sequence, one column per position, holding the likeliest label."""
        dealt = [self.trainer.predict(**options)] * self.trainer.world_size
        if len(dealt) > 1:
            distributed.all_gather_object(dealt, dealt[0])
        if self.trainer.is_global_zero:
            batches = [batch for turn in zip(*dealt, strict=True) for batch in turn]
            batches = batches[: self.datamodule.evaluation_batches("test")]  # more only evened out the ranks'
            with (self.folder / "predictions.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(range(1, batches[0].shape[1] + 1))
                writer.writerows(torch.cat(batches).tolist())
            print(f"predictions are in {self.folder / 'predictions.csv'}")


def check_limits(trainer: Trainer) -> None:
    """Raises ValueError if several processes evaluate so many batches each: measures would depend on their number."""
    for option, sequences in (("limit_val_batches", "validation"), ("limit_test_batches", "test")):
        limit = getattr(trainer, option)
        is_limited = limit != 0 and (isinstance(limit, int) or limit < 1)
        if is_limited and trainer.world_size > 1 and not trainer.fast_dev_run:
            raise ValueError(
                f"{option} is {limit} for each of {trainer.world_size} processes, and measures would depend on their "
                f"number; give data.{sequences}_sequences instead"
            )


def check_devices(trainer: Trainer) -> None:
    """Raises ValueError if there cannot be so many processes, or if they cannot find each other."""
    if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        raise ValueError("strategy starts its processes as copies of this one, which ends with them: give ddp instead")
    if trainer.world_size > 1:
        environment = trainer.strategy.cluster_environment
        environment.validate_settings(num_devices=trainer.num_devices, num_nodes=trainer.num_nodes)
        address = environment.main_address
        try:
            socket.getaddrinfo(address, environment.main_port)
        except socket.gaierror as error:
            raise ValueError(f"MASTER_ADDR is {address}, which has no network address: {error.strerror}") from error
    most = PROCESSES_PER_PROCESSOR * os.cpu_count()
    if isinstance(trainer.accelerator, CPUAccelerator) and trainer.num_devices > most:
        raise ValueError(
            f"devices is {trainer.num_devices}, but this machine's {os.cpu_count()} processors can be shared by {most} "
            "processes at most"
        )


def reach(trainer: Trainer) -> None:
    """Raises ValueError if nobody listens where the first process should, for as long as processes wait for each other.

    torch's own waiting ends in a trace of its C++ code.
    """
    environment = trainer.strategy.cluster_environment
    place = environment.main_address, environment.main_port
    end = monotonic() + (trainer.strategy._timeout or default_pg_timeout).total_seconds()
    while True:
        try:
            socket.create_connection(place, max(0.1, end - monotonic())).close()
            return
        except OSError as error:
            if monotonic() > end:
                raise ValueError(
                    f"nobody answers at MASTER_ADDR {place[0]}, MASTER_PORT {place[1]}, where the first process of "
                    f"this run should be: {error.strerror or error}"
                ) from error
        sleep(0.1)


def steps_before(checkpoint: str | None) -> int:
    """The optimiser steps before a checkpoint, 0 without one."""
    return read_model(checkpoint).get("global_step", 0) if checkpoint and _exists(checkpoint) else 0


class UnstartedFit(CommandLine):
    """A fit that is parsed and whose task and model are built, on whatever machine; nothing is trained or written."""

    def build(self, arguments: list[str]) -> None:
        """Starts over with other arguments, which is quicker than a new parser."""
        self.arguments, self.checkpoint = arguments, {}
        self.parse_arguments(self.parser, None)
        self.instantiate_classes()

    def instantiate_trainer(self, **options: Any) -> None:
        self._check_curriculum()
        self._check_checkpoint()

    def _set_seed(self) -> None:
        """None is needed."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run."""


class FitCheck:
    """Raises UsageError, when called, if what follows `fit` is mistaken."""

    def __init__(self) -> None:
        self.fit: UnstartedFit | None = None

    def __call__(self, arguments: list[str]) -> None:
        if self.fit is None:
            self.fit = UnstartedFit(["fit", *arguments])
        else:
            self.fit.build(["fit", *arguments])


def _exists(path: str | None) -> bool:
    return path is None or Path(path).exists()


def read_model(path: str) -> dict[str, Any]:
    """What a checkpoint or an exported folder holds: hyper_parameters, state_dict and, of a checkpoint, all else.

    Raises:
        UsageError: if it is neither.
    """
    if not Path(path).is_dir():
        return read_checkpoint(path)
    try:
        return read_export(path)
    except ValueError as error:
        raise UsageError(f"ckpt_path: {error}") from error


def list_classes(base: type, arguments: list[str]) -> None:
    """Prints one line for each class below `base` that can be built: its name and its docstring's first sentence."""
    if len(arguments) > 1:
        raise UsageError(f"unexpected argument {arguments[1]}, {arguments[0]} takes none")
    classes = concrete_subclasses(base)
    width = max(len(cls.__name__) for cls in classes)
    for cls in classes:
        print(f"{cls.__name__:{width}}  {' '.join(inspect.getdoc(cls).split()).split('. ')[0].rstrip('.')}.")


def run_function(module: ModuleType, names: tuple[str, ...], arguments: list[str]) -> None:
    """Runs one of a module's functions, for example bench scan; its only one needs no name: export."""
    functions = {name.rstrip("_"): getattr(module, name) for name in names}  # import_ is import, a word of Python's
    try:
        auto_cli(
            functions if len(functions) > 1 else functions.popitem()[1],
            args=arguments[1:],
            as_positional=False,
            parser_class=FunctionParser,
            allow_abbrev=False,
            prog=f"{PROGRAM} {arguments[0]}",
            description=COMMANDS[arguments[0]][1],
        )
    except ValueError as error:  # a backend that cannot run, a file that cannot be written
        raise UsageError(one_line(error)) from error


def run_sweep(arguments: list[str]) -> None:
    """Runs sweep; its help is the function's."""
    parser = FunctionParser(prog=f"{PROGRAM} sweep", allow_abbrev=False, formatter_class=PlainHelp)
    parser.add_function_arguments(sweep, as_positional=True, skip={"check", "program"})
    parser.description = inspect.getdoc(sweep).partition("\nArgs:")[0]
    for action in parser._actions:
        if action.dest == "resume":
            action.nargs, action.const = "?", True  # a switch
    sweep(check=FitCheck(), **parser.instantiate_classes(parser.parse_args(arguments[1:])))


COMMANDS: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "fit": (CommandLine, "train a model, then measure its accuracy by length"),
    "validate": (CommandLine, "measure a model on the validation set"),
    "test": (CommandLine, "measure a model's accuracy by length on the test set"),
    "predict": (CommandLine, "write a model's labels of the test set into predictions.csv"),
    "mixers": (partial(list_classes, SequenceMixer), "list the sequence mixers"),
    "tasks": (partial(list_classes, SequenceTask), "list the tasks"),
    "data": (
        partial(run_function, data, ("export", "import_")),
        "write a task's sequences as CSV (data export) or make a task's files of published ones (data import)",
    ),
    "sweep": (run_sweep, "train all combinations of a file, on this machine or a cluster, and compare them"),
    "compare": (compare.main, "compare runs: a table, curves with bands over seeds, a page (compare.html)"),
    "export": (
        partial(run_function, export, ("export",)),
        "write a checkpoint's model into a folder that needs no run",
    ),
    "generate": (
        partial(run_function, generate, ("generate",)),
        "continue prompts with an exported model",
    ),
    "bench": (
        partial(run_function, bench, ("scan", "solver", "mixers", "devices", "data")),
        "time the scans (bench scan), an iteration (solver), training steps (mixers), several processes (devices) or "
        "the making of data (data)",
    ),
}
HELP = "\n".join(
    [
        f"usage: {PROGRAM} <subcommand> [options]",
        "",
        *(f"  {name:9} {purpose}" for name, (_, purpose) in COMMANDS.items()),
        "",
        f"{PROGRAM} <subcommand> --help lists the options of one.",
    ]
)


def is_not_advertisement(record: logging.LogRecord) -> bool:
    """Whether a log record is about the run rather than about other products."""
    return "litlogger" not in record.getMessage()


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        arguments: the subcommand and its options; None takes those of the process.

    Returns:
        The exit code: 0; 2 after a mistake of the user, a loss that is not finite or a disk that cannot be written,
        told in one sentence on stderr; 1 where another process of the run is lost, likewise; 128 and the number of the
        signal that has ended a run.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(HELP)
        elif arguments[0] in COMMANDS:
            COMMANDS[arguments[0]][0](arguments)
        else:
            raise UsageError(f"unknown subcommand {arguments[0]}, {nearest(arguments[0], COMMANDS)}")
    except (UsageError, NonFiniteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except NothingToDo as reason:
        print(reason)
    except StoppedBySignal as stop:
        if str(stop):
            print(stop, file=sys.stderr)
        return stop.exit_code
    except RuntimeError as error:
        joined = distributed.is_initialized()
        sentence = about_other_processes(error, joined)
        if not sentence:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        return 1 if joined else 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        print(f"error: cannot write {error.filename or 'to the disk'}: {error.strerror}", file=sys.stderr)
        return 2
    return 0
