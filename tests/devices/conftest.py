"""Runs of the command line on one or several processes, each made once."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import command_line
from small_runs import fit


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """run(kind, ranks, *options) is the folder of such a run, which has ended well."""
    made: dict[tuple, Path] = {}

    def get(kind: str, ranks: int, *options: str) -> Path:
        key = kind, ranks, *options
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            assert set(command_line(fit(kind, folder, *options), ranks, folder).results()) == {0}
            (made[key],) = folder.glob("logs/*/*/run_0")
        return made[key]

    return get
