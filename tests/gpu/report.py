"""Writes reports/<gpu>-<date>.md from what run_on_gpu.sh left in a folder: tests.xml, compare.md, scan.csv, and
problems.md if a step failed or ran out of time; what is missing for that reason is said to be missing.
"""

import csv
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import torch

REPORTS = Path(__file__).parent / "reports"


def write(results: Path, reports: Path = REPORTS) -> Path:
    """Writes the report and returns its path."""
    gpu, today = torch.cuda.get_device_name(), date.today().isoformat()
    facts = {
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "CUDA": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version("triton"),
        "commit": _output("git", "describe", "--always", "--dirty=, changed"),
    }
    parts = [
        f"# {gpu}, {today}\n\n" + ", ".join(f"{name} {value}" for name, value in facts.items()),
        _text(results / "problems.md", "All steps came to their end."),
        "## The backends agree\n\n" + _tests(results / "tests.xml"),
        "## Several GPUs are as one\n\n" + _tests(results / "devices.xml", "No tests: they need two."),
        "## Errors against the float64 reference\n\n" + _text(results / "compare.md"),
        "## bench scan\n\nfloat32; ratio is to a copy within the GPU.\n\n" + _table(results / "scan.csv"),
    ]
    name = re.sub(r"\W+", "-", gpu).strip("-").lower()
    path = reports / f"{name}-{today}.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _tests(path: Path, otherwise: str = "The tests did not come to their end.") -> str:
    if not path.exists():
        return otherwise
    suite = ElementTree.parse(path).getroot().find("testsuite")
    counts = {kind: int(suite.get(kind)) for kind in ("tests", "failures", "errors", "skipped")}
    passed = 2 * counts["tests"] - sum(counts.values())
    failed = counts["failures"] + counts["errors"]
    lines = [f"{passed} passed, {failed} failed, {counts['skipped']} skipped in {float(suite.get('time')):.0f} s."]
    for test in suite.findall("testcase"):
        for problem in (*test.findall("failure"), *test.findall("error")):
            lines.append(f"- {test.get('name')}: {' '.join(problem.get('message', '').split())[:200]}")
    return "\n".join(lines)


def _text(path: Path, otherwise: str = "Not measured.") -> str:
    return path.read_text().strip() if path.exists() else otherwise


def _table(path: Path) -> str:
    if not path.exists():
        return "Not measured."
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def _output(*command: str) -> str:
    """The first line that a command prints; unknown if there is no such command or it fails."""
    try:
        ended = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPORTS)
        return ended.stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    print(f"report: {write(Path(sys.argv[1]))}")
