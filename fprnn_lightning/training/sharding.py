"""Weights, gradients and moments cut into as many shards as there are processes (FSDP2): each block's weights are made
whole where it is computed, forward and backward, and dropped again; its gradients go as means to who has the shards.
Embedding, last norm and head stay whole from forward to backward, which begins with the head.

Sequences may be cut as well, into slices of time that neighbouring processes share (`scan.context_parallel`).

Checkpoints are those of an unsharded run, one file with the same names: written by the first process, read by all, each
of which keeps its shards. So a run goes on with any number of processes and any strategy.
"""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fprnn_lightning.model import SequenceModel
from fprnn_lightning.scan import TimeSlices, context_parallel


class Sharded(ModelParallelStrategy):
    """Every process holds its share of weights, gradients and moments, and draws its share of the batch.

    A validation or test gathers all weights once at its start, so processes may evaluate unlike numbers of batches, of
    whole sequences, of which nothing is kept for a backward.

    Args:
        slices: how many neighbouring processes train on the same sequences, each on the slice of time after its
            forerunner's, for sequences that leave one too little memory; 1 cuts none. It must divide the number of
            processes, and no training sequence may have fewer tokens. Mixers that walk through time cannot be cut.
        process_group_backend: what carries the exchange; null takes nccl between GPUs and gloo between CPUs.
        timeout: how long a process waits for the others.
    """

    def __init__(
        self,
        slices: int = 1,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        if slices < 1:
            raise ValueError(f"Sharded: slices is {slices}, must be at least 1")
        options = {"process_group_backend": process_group_backend, "timeout": timeout}
        super().__init__(save_distributed_checkpoint=False, **options)
        self.undecayed: set[str] = set()
        self.slices = slices
        self.group: dist.ProcessGroup | None = None  # of the processes with slices of the same sequences

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()
        if self.slices > 1 and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self.group, _ = dist.new_subgroups(self.slices, timeout=self._timeout)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Of which sequences a process learns.

        Raises:
            ValueError: if the processes cannot be grouped.
        """
        shares, rest = divmod(self.world_size, self.slices)
        if rest:
            processes = f"the number of processes, {self.world_size}"
            raise ValueError(f"Sharded: slices is {self.slices}, must divide {processes}")
        return {"num_replicas": shares, "rank": self.global_rank // self.slices}

    def setup(self, trainer: Trainer) -> None:
        self.undecayed = _undecayed(self.model)
        super().setup(trainer)

    def model_to_device(self) -> None:
        super().model_to_device()
        _mark(self.model, self.undecayed)

    def time_slices(self) -> AbstractContextManager[TimeSlices | None]:
        """A context in which sequences are slices in time of longer ones, if they are cut."""
        return nullcontext() if self.group is None else context_parallel(self.group)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._whole(optimizer.state_dict())

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        own = self.lightning_module.state_dict()
        shards = {name: _like(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(shards, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            state = {
                number: {name: _like(value, parameter) for name, value in saved["state"].get(number, {}).items()}
                for number, parameter in zip(numbers, parameters, strict=True)
            }
            optimizer.load_state_dict({**saved, "state": state})

    def on_validation_start(self) -> None:
        gather(self.lightning_module.model)

    def on_validation_end(self) -> None:
        scatter(self.lightning_module.model)

    def on_test_start(self) -> None:
        gather(self.lightning_module.model)

    def on_test_end(self) -> None:
        scatter(self.lightning_module.model)

    def on_predict_start(self) -> None:
        gather(self.lightning_module.model)

    def on_predict_end(self) -> None:
        scatter(self.lightning_module.model)

    def _whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with whole tensors, on the CPU of the first process; others get what is of use to no one."""

        def whole(value: Any) -> Any:
            if isinstance(value, DTensor):
                value = value.full_tensor()  # an exchange: all take part
            if not isinstance(value, Tensor):
                return value
            return value.detach().cpu() if self.is_global_zero else None

        return tree_map(whole, state)


def shard(model: SequenceModel, mesh: DeviceMesh) -> None:
    """Cuts the weights of a model in place: those of each block, and those of the rest, are gathered together.

    Args:
        model: equal on all processes; left as it is if it is cut already.
        mesh: the processes, in one dimension.
    """
    if isinstance(model, FSDPModule):
        return
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # no one writes into the logits
    undecayed = _undecayed(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)  # backward begins with the head
    _mark(model, undecayed)


def gather(model: SequenceModel) -> None:
    """Makes the weights of a cut model whole on every process, until `scatter`; no forward exchanges anything then."""
    with torch.inference_mode(False), torch.no_grad():  # made in inference mode they would be of no use to training
        for module in _cut(model):
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()


def scatter(model: SequenceModel) -> None:
    """Has every process keep its shards only, after `gather`."""
    for module in _cut(model):
        module.set_reshard_after_forward(module is not model, recurse=False)
        module.reshard()


def _cut(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _undecayed(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if getattr(parameter, "no_weight_decay", False)}


def _mark(model: nn.Module, undecayed: set[str]) -> None:
    """Marks parameters again that were made anew, by sharding or moving, which no attribute survives."""
    for name, parameter in model.named_parameters():
        if name in undecayed:
            parameter.no_weight_decay = True


def _like(value: Any, own: Any) -> Any:
    """A whole tensor as the shard of it that `own` is of a tensor of this shape."""
    if isinstance(own, DTensor) and isinstance(value, Tensor) and value.shape == own.shape:
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
    return value
