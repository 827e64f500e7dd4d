"""What a run shows and when it stops: Lightning callbacks, each usable alone."""

from fprnn_lightning.callbacks.continuation import Continuation
from fprnn_lightning.callbacks.find_learning_rate import FindLearningRate
from fprnn_lightning.callbacks.gradient_norm import GradientNorm
from fprnn_lightning.callbacks.length_curve import LengthCurve
from fprnn_lightning.callbacks.metrics_file import MetricsFile
from fprnn_lightning.callbacks.model_page import ModelPage
from fprnn_lightning.callbacks.nonfinite_guard import NonFiniteError, NonFiniteGuard
from fprnn_lightning.callbacks.progress import Progress
from fprnn_lightning.callbacks.run_checkpoint import RunCheckpoint
from fprnn_lightning.callbacks.run_profiler import RunProfiler
from fprnn_lightning.callbacks.run_table import RunTable
from fprnn_lightning.callbacks.same_start import SameStart
from fprnn_lightning.callbacks.solver_profile import SolverProfile
from fprnn_lightning.callbacks.solver_report import SolverReport
from fprnn_lightning.callbacks.start_line import StartLine
from fprnn_lightning.callbacks.stop_on_signal import StopOnSignal, StoppedBySignal
from fprnn_lightning.callbacks.stop_when_solved import StopWhenSolved
from fprnn_lightning.callbacks.throughput import Throughput

__all__ = [
    "Continuation",
    "FindLearningRate",
    "GradientNorm",
    "LengthCurve",
    "MetricsFile",
    "ModelPage",
    "NonFiniteError",
    "NonFiniteGuard",
    "Progress",
    "RunCheckpoint",
    "RunProfiler",
    "RunTable",
    "SameStart",
    "SolverProfile",
    "SolverReport",
    "StartLine",
    "StopOnSignal",
    "StopWhenSolved",
    "StoppedBySignal",
    "Throughput",
]
