"""Tasks: LightningDataModules that make labelled sequences.

Every file here is imported, so a new task is one new file.
"""

import importlib
import pkgutil

from fprnn_lightning.tasks.associative_recall import AssociativeRecall
from fprnn_lightning.tasks.base import SequenceTask
from fprnn_lightning.tasks.copying import Copying, DuplicateCopying
from fprnn_lightning.tasks.formal_languages import (
    CycleNavigation,
    EvenPairs,
    ModularArithmetic,
    ModularArithmeticWithBrackets,
    Parity,
)
from fprnn_lightning.tasks.lookup import PrefixLookup, SuffixLookup
from fprnn_lightning.tasks.selective_copying import SelectiveCopying
from fprnn_lightning.tasks.word_problem import WordProblem

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "AssociativeRecall",
    "Copying",
    "CycleNavigation",
    "DuplicateCopying",
    "EvenPairs",
    "ModularArithmetic",
    "ModularArithmeticWithBrackets",
    "Parity",
    "PrefixLookup",
    "SelectiveCopying",
    "SequenceTask",
    "SuffixLookup",
    "WordProblem",
]
