"""Who may import whom: every arrow between rooms is drawn here, and one that is not fails."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fprnn_lightning"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

ARROWS = {  # room: what of the package it may import besides itself
    "__init__": ["pretrained"],
    "__main__": ["cli"],
    "sentences": [],
    "whole_files": [],
    "run_folders": ["sentences"],
    "figures": ["mixers.base"],
    "pretrained": ["training", "mixers.base", "tasks.base", "sentences"],
    "scan": [],
    "channel_mixers": ["solvers"],
    "solvers": [],
    "tasks": ["whole_files"],
    "cores": ["scan"],
    "mixers": ["cores", "channel_mixers", "solvers", "scan"],
    "model": ["mixers.base"],
    "training": ["model", "mixers.base", "scan", "sentences", "whole_files"],
    "callbacks": ["mixers.base", "training.metrics", "scan", "sentences", "whole_files", "figures"],
    "launchers": ["sentences"],
    "commands": [
        *("sentences", "whole_files", "figures", "launchers", "pretrained", "training", "callbacks"),
        *("scan", "mixers", "cores", "channel_mixers", "solvers", "model", "tasks"),
    ],
    "cli": [
        *("sentences", "whole_files", "run_folders", "pretrained", "mixers", "tasks", "training", "callbacks"),
        "commands",
    ],
}
LIGHTNING_ROOMS = {"tasks", "training", "callbacks", "commands", "pretrained", "cli"}


def imports(source: str, file: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, at its top or later, `from package import module` included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = ["fprnn_lightning", *file.parent.parts]
            parents = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*parents, *(node.module or "").split(".")]).rstrip(".")
            folder = PACKAGE.parent.joinpath(*module.split("."))
            for alias in node.names:
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                yield f"{module}.{alias.name}" if is_module else module


def violations(source: str, file: Path) -> list[str]:
    room = file.parts[0].removesuffix(".py")
    allowed = [room, *ARROWS[room]]
    found = []
    for name in imports(source, file):
        top, _, inner = name.partition(".")
        within = any(inner == target or inner.startswith(f"{target}.") for target in allowed)
        if (
            (top == "fprnn_lightning" and inner and not within)
            or (top in ("lightning", "pytorch_lightning") and room not in LIGHTNING_ROOMS)
            or (top in ("numba", "triton") and not file.stem.endswith("kernels"))
        ):
            found.append(f"{file} imports {name}")
    return found


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_file_imports_only_along_drawn_arrows(file: Path) -> None:
    assert violations((PACKAGE / file).read_text(), file) == []


def test_every_room_is_drawn() -> None:
    assert {file.parts[0].removesuffix(".py") for file in FILES} <= ARROWS.keys()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("scan/linear.py", "from fprnn_lightning.cores import Core"),
        ("scan/linear.py", "from ..cores.base import Core"),
        ("scan/linear.py", "from .. import cores"),
        ("tasks/base.py", "def late():\n    import fprnn_lightning.model.block"),
        ("model/block.py", "from fprnn_lightning.mixers import dense"),
        ("model/block.py", "from fprnn_lightning.mixers import SequenceMixer"),
        ("callbacks/progress.py", "from fprnn_lightning.training import metrics, schedules"),
        ("training/metrics.py", "from fprnn_lightning import cli"),
        ("mixers/dense.py", "from lightning.pytorch import Callback"),
        ("scan/linear.py", "import numba"),
        ("mixers/dense.py", "from triton import language"),
    ],
)
def test_a_planted_violation_is_found(file: str, source: str) -> None:
    assert violations(source, Path(file))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("model/block.py", "from fprnn_lightning.mixers.base import SequenceMixer"),
        ("model/block.py", "from fprnn_lightning.mixers import base"),
        ("scan/linear_cpu_kernels.py", "import numba"),
        ("mixers/dense.py", "from . import base"),
        ("cli.py", "from fprnn_lightning import __version__"),
    ],
)
def test_a_drawn_arrow_is_allowed(file: str, source: str) -> None:
    assert violations(source, Path(file)) == []
