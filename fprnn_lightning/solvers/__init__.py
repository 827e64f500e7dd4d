"""Solvers of y = f(y) for any f, and the gradient rules of their solutions. Every file of this folder is imported."""

from importlib import import_module
from pkgutil import iter_modules

from fprnn_lightning.solvers.base import Solution, Solver, solve
from fprnn_lightning.solvers.gradients import GradientRule
from fprnn_lightning.solvers.stopping import Stopping

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["GradientRule", "Solution", "Solver", "Stopping", "solve"]
