"""Training: the LightningModule, its metrics, learning-rate schedules, length curricula and checkpoints."""

from fprnn_lightning.training.checkpoint_file import WholeCheckpoints, read_checkpoint
from fprnn_lightning.training.curriculum import Curriculum, FixedLength, ProgressiveLengths, UniformLengths
from fprnn_lightning.training.lost_processes import ending_with_lost_processes
from fprnn_lightning.training.metrics import AnswerAccuracy, LengthAccuracy
from fprnn_lightning.training.schedules import Schedule, WarmupConstant, WarmupCosine, WarmupHoldCosine
from fprnn_lightning.training.sequence_learner import SequenceLearner
from fprnn_lightning.training.sharding import Sharded

__all__ = [
    "AnswerAccuracy",
    "Curriculum",
    "FixedLength",
    "LengthAccuracy",
    "ProgressiveLengths",
    "Schedule",
    "SequenceLearner",
    "Sharded",
    "UniformLengths",
    "WarmupConstant",
    "WarmupCosine",
    "WarmupHoldCosine",
    "WholeCheckpoints",
    "ending_with_lost_processes",
    "read_checkpoint",
]
