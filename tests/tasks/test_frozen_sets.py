"""The frozen evaluation sets in data/: their checksums, their products, and that their commands still make them."""

import csv
import hashlib
import itertools
import re
import shlex
from pathlib import Path

import pytest

from fprnn_lightning.cli import main

DATA = Path(__file__).parents[2] / "data"
CHECKSUMS = {  # SHA-256
    "a5_length_50.csv": "a7b63985470aed7e230c6507aadda293f5d99734dd659d0185133b19b914e742",
    "s5_length_50.csv": "45f4f92b473ec0db7db0a4536550f2c63e056cdbc7a86c8f3d6b6b2a9d51c8b0",
}


def permutations(name):
    """All permutations of five points in lexicographic order, of A5 those with an even number of inversions."""
    for images in itertools.permutations(range(5)):
        inversions = sum(a > b for a, b in itertools.combinations(images, 2))
        if name.startswith("s5") or inversions % 2 == 0:
            yield images


def test_every_set_is_known():
    assert {path.name for path in DATA.glob("*.csv")} == set(CHECKSUMS)


@pytest.mark.parametrize(("name", "checksum"), CHECKSUMS.items())
def test_checksum(name, checksum):
    assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == checksum


@pytest.mark.parametrize("name", CHECKSUMS)
def test_targets_are_running_products(name):
    elements = list(permutations(name))
    with (DATA / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({row["input"] for row in rows}) == len(rows) == 256
    for row in rows:
        tokens, targets = ([int(word) for word in row[column].split()] for column in ("input", "target"))
        assert len(tokens) == len(targets) == 50
        places = list(range(5))  # where each point is by now
        for token, target in zip(tokens, targets, strict=True):
            places = [elements[token][place] for place in places]
            assert elements[target] == tuple(places)


def test_the_commands_beside_them_make_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (block,) = re.findall(r"^```bash\n(.*?)^```", (DATA / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines():
        assert main(shlex.split(line)[3:]) == 0
    for name in CHECKSUMS:
        assert (tmp_path / "data" / name).read_bytes() == (DATA / name).read_bytes()
