"""Where the runs of a sweep are run: on this machine, under Slurm, on a Ray cluster."""

from fprnn_lightning.launchers.base import Launcher, Task
from fprnn_lightning.launchers.local import Local
from fprnn_lightning.launchers.ray import Ray
from fprnn_lightning.launchers.slurm import Slurm

__all__ = ["Launcher", "Local", "Ray", "Slurm", "Task"]
