"""Sharded weights: what 2 and 4 processes train is what one trains on the whole batch, clipping by the global norm;
their checkpoints are those of one process, and go on with any number of them.
"""

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from fprnn_lightning.callbacks import NonFiniteError, NonFiniteGuard
from fprnn_lightning.cli import main
from fprnn_lightning.commands.bench_mixers import fixed_point
from fprnn_lightning.cores.selective_ssm import SelectiveSSM
from fprnn_lightning.mixers.dense import DenseMixer
from fprnn_lightning.mixers.diagonal import DiagonalMixer
from fprnn_lightning.solvers.caps import RandomCap
from fprnn_lightning.tasks.base import count_scored
from fprnn_lightning.training import (
    FixedLength,
    SequenceLearner,
    Sharded,
    WarmupConstant,
    WholeCheckpoints,
    checkpoint_file,
    read_checkpoint,
)

STEPS, SAVED_AFTER, VOCABULARY = 6, 3, 5
SECONDS = 200.0  # that nothing takes unless it hangs
CLIP = 0.5  # below the norm of every gradient


def random_iterations(width: int) -> torch.nn.Module:
    """A fixed-point mixer whose number of iterations is drawn, but does not depend on the batch."""
    return fixed_point(width, iterations=RandomCap())


def selective(width: int) -> torch.nn.Module:
    """One with parameters that say themselves that they do not decay."""
    return DiagonalMixer(width, core=SelectiveSSM)


SHARDED = Path(__file__).parents[2] / "configs" / "hardware" / "sharded.yaml"
RUN = {
    "data": {
        "class_path": "Copying",
        "init_args": {
            **{"batch_size": 8, "train_length": 12, "alphabet": 3, "shortest": 1, "longest": 3},
            **{"validation_lengths": [2, 3], "test_lengths": [2, 3], "validation_sequences": 8, "test_sequences": 12},
        },
    },
    "model": {
        "mixer": "FixedPointMixer",
        "width": 8,
        "curriculum": {"class_path": "FixedLength", "init_args": {"length": 12}},
        "recompute": True,
    },
    "trainer": {"max_steps": 6, "val_check_interval": 3, "log_every_n_steps": 1, "enable_progress_bar": False},
}
TOGETHER = {"TORCHELASTIC_RUN_ID": "test"}  # as torchrun sets it, so that one fit can follow another

MIXERS = {"fixed_point": random_iterations, "dense": DenseMixer, "diagonal": selective}


class Batches(IterableDataset):
    """Given batches, once."""

    def __init__(self, batches: list[tuple[Tensor, ...]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(self.batches)


class Trace(Callback):
    """Notes loss, norm before and after clipping and the learner's draws of every step, and saves after one of them."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.norms: list[float] = []
        self.clipped: list[float] = []
        self.losses: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: SequenceLearner) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.clipped.append(global_norm(pl_module)))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: SequenceLearner, optimizer: Any) -> None:
        self.norms.append(global_norm(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: SequenceLearner, *_: Any) -> None:
        if not trainer.fit_loop._should_accumulate():
            self.losses.append(float(trainer.callback_metrics["train/loss"]))
        if trainer.global_step == SAVED_AFTER and self.path is not None:
            trainer.save_checkpoint(self.path)


def global_norm(learner: SequenceLearner) -> float:
    """The 2-norm of all gradients together, summed here by hand."""
    gradients = [parameter.grad for parameter in learner.parameters()]
    whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in whole))


def batches() -> list[tuple[Tensor, Tensor]]:
    """The global batches of a run, 8 sequences each."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(VOCABULARY, (2, 8, 6), generator=generator).unbind()) for _ in range(STEPS)]


def learner(mixer: str, **options: Any) -> SequenceLearner:
    seed_everything(0, verbose=False)
    course = {"curriculum": FixedLength(6), "schedule": WarmupConstant(1), "validation_lengths": [6]}
    sizes = {"width": 12, "layers": 2, "mlp_ratio": 2, "weight_decay": 0.3}
    return SequenceLearner(MIXERS[mixer], VOCABULARY, **sizes | course | options)


def trainer(strategy: Any, folder: Path, **options: Any) -> Trainer:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    quiet |= {"enable_checkpointing": False, "use_distributed_sampler": False, "plugins": [WholeCheckpoints()]}
    course = {"max_steps": STEPS, "gradient_clip_val": CLIP, "log_every_n_steps": 1, "default_root_dir": folder}
    course |= {"check_val_every_n_epoch": None, "val_check_interval": 2}
    where = {"accelerator": "cpu", "devices": ranks, "strategy": strategy}
    return Trainer(**quiet, **course | where | options)


def train(
    mixer: str,
    strategy: Any,
    folder: Path,
    save: Path | None = None,
    resume: Path | None = None,
    recompute: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains on this rank's part of the batches, from a checkpoint if there is one; and the state at the end."""
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    trace, model = Trace(save), learner(mixer, recompute=recompute)
    accumulated = options.get("accumulate_grad_batches", 1)
    own = [(*(part.chunk(ranks)[rank] for part in batch), accumulated * count_scored(batch[1])) for batch in batches()]
    fit = trainer(strategy, folder, callbacks=[trace], **options)
    training = Batches(own[SAVED_AFTER:] if resume else own)
    measured = Batches([own[0][:2]] * (1 + rank))  # more on some processes than on others
    loaders = [DataLoader(stream, batch_size=None) for stream in (training, measured)]
    fit.fit(model, *loaders, ckpt_path=resume, weights_only=True)
    state = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    groups = [(group["weight_decay"], len(group["params"])) for group in fit.optimizers[0].param_groups]
    local = sum(part.to_local().numel() for part in model.parameters() if isinstance(part, DTensor))
    return {
        "losses": trace.losses,
        "norms": trace.norms,
        "clipped": trace.clipped,
        "groups": groups,
        "state": {name: state[name] for name in ("state_dict", "optimizer_states")},
        "local": local,
    }


def train_all(folder: Path) -> dict[str, Any]:
    """What two processes do."""
    found = {}
    for mixer in MIXERS:
        found[mixer, "ddp"] = train(mixer, "ddp", folder)
        found[mixer, "sharded"] = train(mixer, Sharded(), folder, save=folder / f"{mixer}_sharded.ckpt")
        found[mixer, "resumed"] = train(mixer, Sharded(), folder, resume=folder / f"{mixer}_whole.ckpt")
    for name, make in (("ddp", lambda: "ddp"), ("sharded", Sharded)):
        found["recomputed", name] = train("fixed_point", make(), folder, recompute=True)
        found["bf16", name] = train("fixed_point", make(), folder, precision="bf16-mixed")
        found["accumulated", name] = train("dense", make(), folder, accumulate_grad_batches=2, max_steps=3)
    return found


class Spoil(Callback):
    """Makes one weight of the first process infinite before the third step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: SequenceLearner, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.is_global_zero:
            pl_module.model.head.weight.to_local().data[0, 0] = torch.inf


def spoilt(folder: Path) -> str:
    """What is said of a loss that is not finite."""
    fit = trainer(Sharded(), folder, callbacks=[Spoil(), NonFiniteGuard()])
    with pytest.raises(NonFiniteError) as raised:
        counted = [(tokens, targets, count_scored(targets)) for tokens, targets in batches()]
        fit.fit(learner("dense"), DataLoader(Batches(counted), batch_size=None))
    return str(raised.value)


def by_the_command_line(folder: Path) -> dict[str, Any]:
    """A fit with the configuration as it is shipped, whose test generates; then what is said of a spoilt weight."""
    options = ["--trainer.accelerator=cpu", "--trainer.devices=2", f"--trainer.default_root_dir={folder}"]
    found = {"code": main(["fit", "--config", str(folder / "run.yaml"), "--config", str(SHARDED), *options])}
    return found | {"spoilt": spoilt(folder)}


def go_on(folder: Path) -> dict[str, Any]:
    """What four processes do with the checkpoints of two."""
    found = {mixer: train(mixer, Sharded(), folder, resume=folder / f"{mixer}_sharded.ckpt") for mixer in MIXERS}
    return found | {"straight": train("dense", Sharded(), folder)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """One process on the whole batch."""
    return {mixer: train(mixer, "auto", folder, save=folder / f"{mixer}_whole.ckpt") for mixer in MIXERS}


@pytest.fixture(scope="module")
def two(folder: Path, alone: dict[str, Any]) -> dict[Any, Any]:
    return Ranks(train_all, 2, folder, folder, environment=TOGETHER).results(SECONDS)[0]


@pytest.fixture(scope="module")
def four(folder: Path, two: dict[Any, Any]) -> dict[str, Any]:
    return Ranks(go_on, 4, folder, folder, environment=TOGETHER).results(SECONDS)[0]


def assert_same(left: Any, right: Any, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mixer", MIXERS)
def test_two_processes_train_as_one_does(mixer: str, alone: dict[str, Any], two: dict[Any, Any]) -> None:
    for strategy in ("ddp", "sharded"):
        assert_same(two[mixer, strategy]["losses"], alone[mixer]["losses"])
        assert_same(two[mixer, strategy]["norms"], alone[mixer]["norms"])
    assert_same(two[mixer, "sharded"]["losses"], two[mixer, "ddp"]["losses"], 1e-6)
    assert two[mixer, "ddp"]["local"] == 0


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_global_norm_is_clipped(mixer: str, alone: dict[str, Any], two: dict[Any, Any]) -> None:
    assert min(alone[mixer]["norms"]) > CLIP
    for found in (alone[mixer], two[mixer, "sharded"], two[mixer, "ddp"]):
        assert_same(found["clipped"], [CLIP] * STEPS)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_process_holds_half_and_the_same_parameters_decay(
    mixer: str, alone: dict[str, Any], two: dict[Any, Any]
) -> None:
    whole = sum(parameter.numel() for parameter in learner(mixer).parameters())
    assert two[mixer, "sharded"]["local"] <= 0.55 * whole
    assert two[mixer, "sharded"]["groups"] == alone[mixer]["groups"]


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_checkpoint_is_that_of_one_process(mixer: str, folder: Path, two: dict[Any, Any]) -> None:
    sharded, whole = (read_checkpoint(folder / f"{mixer}_{kind}.ckpt") for kind in ("sharded", "whole"))
    assert sharded.keys() == whole.keys()
    for name in ("state_dict", "optimizer_states"):
        assert_same(sharded[name], whole[name])  # the same keys in the same order too
    assert list(sharded["state_dict"]) == list(whole["state_dict"])


@pytest.mark.parametrize("mixer", MIXERS)
def test_other_numbers_of_processes_go_on(
    mixer: str, folder: Path, alone: dict[str, Any], two: dict[Any, Any], four: dict[str, Any]
) -> None:
    one = train(mixer, "auto", folder, resume=folder / f"{mixer}_sharded.ckpt")
    for resumed in (one, two[mixer, "resumed"], four[mixer]):
        assert_same(resumed["losses"], alone[mixer]["losses"][SAVED_AFTER:])
        assert_same(resumed["clipped"], [CLIP] * (STEPS - SAVED_AFTER))
        assert_same(resumed["state"], alone[mixer]["state"], 1e-4)


def test_four_processes_train_as_one_does(alone: dict[str, Any], four: dict[str, Any]) -> None:
    assert_same(four["straight"]["losses"], alone["dense"]["losses"])
    assert_same(four["straight"]["state"], alone["dense"]["state"], 1e-4)


@pytest.mark.parametrize("what", ["bf16", "accumulated"])
def test_mixed_precision_and_accumulation_are_those_of_ddp(what: str, two: dict[Any, Any]) -> None:
    assert_same(two[what, "sharded"]["losses"], two[what, "ddp"]["losses"], 1e-5)
    assert_same(two[what, "sharded"]["norms"], two[what, "ddp"]["norms"], 1e-3)


def test_blocks_computed_again_change_nothing(two: dict[Any, Any]) -> None:
    for strategy in ("ddp", "sharded"):
        assert_same(two["recomputed", strategy]["losses"], two["fixed_point", strategy]["losses"])
        assert_same(two["recomputed", strategy]["norms"], two["fixed_point", strategy]["norms"])
        assert_same(two["recomputed", strategy]["state"], two["fixed_point", strategy]["state"], 1e-4)


@pytest.fixture(scope="module")
def commanded(folder: Path) -> list[dict[str, Any]]:
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    return Ranks(by_the_command_line, 2, folder, folder, environment=TOGETHER).results(SECONDS)


@pytest.mark.filterwarnings("ignore:layer 0. .* have not converged")
def test_one_process_tests_what_two_have_trained(commanded: list[dict[str, Any]], folder: Path) -> None:
    assert [found["code"] for found in commanded] == [0, 0]
    (run,) = (folder / "copying" / "fixed_point").iterdir()
    alone = ["--trainer.accelerator=cpu", "--trainer.strategy=auto", "--trainer.devices=1"]
    assert main(["test", "--config", str(run / "config.yaml"), *alone, f"--ckpt_path={run / 'last.ckpt'}"]) == 0
    assert (run / "test_0" / "length_curve.csv").read_text() == (run / "length_curve.csv").read_text()


def test_all_processes_name_the_weight_that_is_not_finite(commanded: list[dict[str, Any]]) -> None:
    first, second = (found["spoilt"] for found in commanded)
    assert first == second
    assert "at step 2; first not finite: parameter model.head.weight" in first


def killed_while_saving(path: Path) -> None:
    """Trains and saves; the first process is killed in the middle of the second save."""
    saves = []

    def write(checkpoint: dict[str, Any], partial: Path) -> None:
        torch.save(checkpoint, partial)
        saves.append(partial)
        if len(saves) == 2:
            os.truncate(partial, partial.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint_file._save = write
    train("dense", Sharded(), path.parent, save=path)
    train("dense", Sharded(), path.parent, save=path)


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_before(folder: Path) -> None:
    path = folder / "killed.ckpt"
    codes = Ranks(killed_while_saving, 2, folder, path, environment=TOGETHER).wait(SECONDS)
    assert codes[0] == -signal.SIGKILL
    assert codes[1] != 0
    assert read_checkpoint(path)["global_step"] == SAVED_AFTER
