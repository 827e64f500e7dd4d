"""The commands of README.md work, typed one after another in one folder: `make` lines are resolved, not run,
subcommands run with tiny sizes, timings and the runs of a sweep are replaced by nothing, and of an installation only
the pins are checked.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from fprnn_lightning import cli

ROOT = Path(__file__).parents[1]
PROGRAM = ["python", "-m", "fprnn_lightning"]
NOT_RUN = {"cd", "git", "source", ".", "tensorboard"}  # need a network, a shell or a browser
SMALL = {
    "fit": ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--data.batch_size=4"],
    "all": [
        *("--trainer.accelerator=cpu", "--data.validation_sequences=4"),
        *("--data.test_sequences=4", "--data.test_lengths=[16]"),
    ],
}


def commands(text: str) -> list[list[str]]:
    """The words of every command in the ```bash blocks of a text; comments left out, continued lines joined."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check(words: list[str]) -> None:
    if words[0] == "make":
        subprocess.run(["make", "-n", "-C", ROOT, *words[1:]], check=True, capture_output=True)
    elif words[:3] == PROGRAM:
        subcommand = words[3]
        small = SMALL["all"] if subcommand in cli.CommandLine.subcommands() else []
        try:
            code = cli.main([*words[3:], *small, *SMALL.get(subcommand, [])])
        except SystemExit as ended:  # after --help
            code = ended.code
        assert code == 0
    elif "pip" in words:
        assert words[words.index("-c") + 1] == "constraints.txt"
    else:
        assert words[0] in NOT_RUN or words[:3] in (["python3", "-m", "venv"], ["python", "-m", "venv"])


def test_every_command_of_the_readme_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timing(output: Path | None = None) -> None:
        """Times nothing."""

    for name in ("scan", "solver", "mixers", "devices", "data"):
        monkeypatch.setattr(cli.bench, name, timing)
    monkeypatch.setattr("fprnn_lightning.commands.sweep.follow", lambda *_: None)  # all runs are checked, none is run
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    found = commands((ROOT / "README.md").read_text())
    assert ["make", "quickstart"] in found
    assert ["make", "test"] in found
    assert any(words[:4] == [*PROGRAM, "fit"] for words in found)
    for words in found:
        check(words)


@pytest.mark.parametrize(
    "line", ["make quikstart", "python -m fprnn_lightning mixer", "pip install -c a.txt -e .", "rm -r logs", "pytest"]
)
def test_a_command_that_does_not_work_is_found(line: str) -> None:
    (words,) = commands(f"text\n```bash\n# typed by a newcomer\n{line}  # here\n```\n")
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        check(words)
