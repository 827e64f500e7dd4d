"""The page: what it holds, that it is one file, and that it works in a browser."""

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fprnn_lightning.commands.compare_figures import band, by_length
from fprnn_lightning.commands.compare_page import page
from fprnn_lightning.commands.event_files import Series
from fprnn_lightning.commands.groups import sections
from fprnn_lightning.commands.runs import find_runs, read_run
from fprnn_lightning.figures import mixer_style

MakeRun = Callable[..., Path]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome to open it in")
DENSE = {"class_path": "DenseMixer", "init_args": {"core": {"class_path": "GatedDiagonal"}}}
VOID = {"meta", "input", "br"}
SWITCHES = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
SWITCHES += ["--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND"]
OWN_HOSTS = r"[\w.]*\.(?:google|googleapis|gstatic)\.com/"  # where the browser itself wants to go


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, make_run: MakeRun) -> Path:
    """A page of two tasks, with names that must be escaped."""
    logs = tmp_path_factory.mktemp("logs")
    for seed in range(2):
        make_run(logs / f"lstm_{seed}", seed, {16: 0.9 - seed / 7, 50: 0.1, 128: 0.0}, trainer__max_time="<b>&")
        make_run(logs / f"dense_{seed}", seed, model__mixer=DENSE, hparams={"parameters": 1234.0})
    make_run(logs / "other", model__mixer={"class_path": "ZMixer"}, finished=False, validation={100: 0.1, 200: 0.2})
    make_run(logs / "s3" / "<i>run", data__init_args={"group": "S3", "train_length": 16})
    runs = [read_run(run) for run in find_runs([logs])]
    path = logs / "compare.html"
    path.write_text(page(sections(runs), {logs / "empty<u>": "nothing is <logged>"}, [logs]))
    return path


class Structure(HTMLParser):
    """Checks that elements close in order, and collects what a test looks at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def opened(path: Path, tmp_path: Path, address: str = "") -> tuple[str, list[str], list[str]]:
    """The document once it is shown, what the console says, and the addresses asked for."""
    log = tmp_path / "net.json"
    switches = [*SWITCHES, f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={log}"]
    switches += ["--enable-logging=stderr", "--v=0", "--dump-dom", f"{path.as_uri()}{address}"]
    done = subprocess.run([BROWSER, *switches], capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    asked = re.findall(r'"url":"(https?://[^"]*)', log.read_text())
    return done.stdout, console, [address for address in asked if not re.match(rf"https?://{OWN_HOSTS}", address)]


def column(document: str, table: str, index: int) -> list[str]:
    """The texts of a column of a table."""
    body = re.search(rf'id="{table}".*?<tbody>(.*?)</tbody>', document, re.DOTALL)[1]
    rows = [re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL) for row in re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)]
    return [re.sub(r"<svg.*?</svg>|<small>.*?</small>|<.*?>", "", row[index], flags=re.DOTALL).strip() for row in rows]


def test_it_is_well_formed_and_names_nothing_twice(path: Path) -> None:
    elements = Structure(path.read_text()).elements
    names = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(names) == len(set(names))
    used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', path.read_text())
    assert {a or b for a, b in used} <= set(names)
    assert not [tag for tag, _ in elements if tag in ("b", "i", "u", "logged")], "names are escaped"


def test_it_needs_no_other_file(path: Path) -> None:
    text = path.read_text()
    for tag, attributes in Structure(text).elements:
        assert tag not in ("link", "img", "iframe", "object")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/[\w/]+", "", text)
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_every_group_has_a_switch_and_lines_of_its_colour(path: Path) -> None:
    text = path.read_text()
    elements = Structure(text).elements
    switches = {attributes["value"] for tag, attributes in elements if tag == "input"}
    lines = {attributes["data-group"] for _, attributes in elements if attributes.get("class") == "group"}
    assert switches == lines == {"0-0", "0-1", "0-2", "1-0"}
    first = text.index('data-group="0-0"')
    assert mixer_style("dense GatedDiagonal").colour in text[first : first + 2000]
    assert "<title>dense GatedDiagonal</title>" in text[first : first + 200]


def test_what_it_tells(path: Path) -> None:
    text = path.read_text()
    figures = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    training = ["Tokens right in validation, by steps", "Tokens right in validation, by minutes"]
    assert figures == ["Sequences right by length", *training] * 2
    assert column(text, "groups-0", 0) == ["dense GatedDiagonal", "lstm", "z"]
    assert column(text, "groups-0", 2) == ["1,234", "–", "–"]
    assert column(text, "runs-0", 3) == ["dense_0", "dense_1", "lstm_0", "lstm_1", "other"]
    assert column(text, "runs-0", 4) == ["600", "600", "600", "600", "200"]
    assert "<small>of 600</small>" in text
    assert "nothing is &lt;logged&gt;" in text
    differ = text[text.index("What the groups differ in: 2 options") :]
    assert "model.mixer</th>" in differ
    assert "&lt;b&gt;&amp;" in differ


@in_browser
def test_it_opens_without_errors_and_asks_for_nothing(path: Path, tmp_path: Path) -> None:
    document, console, asked = opened(path, tmp_path)
    assert (console, asked) == ([], [])
    assert column(document, "groups-0", 0) == ["dense GatedDiagonal", "lstm", "z"]


@in_browser
def test_its_policy_forbids_the_network(path: Path, tmp_path: Path) -> None:
    text = path.read_text().replace("<main>", '<main><img src="http://elsewhere.invalid/picture.png">')
    (tmp_path / "page.html").write_text(text)
    _, console, asked = opened(tmp_path / "page.html", tmp_path)
    assert asked == []
    assert "Content Security Policy" in console[0]
    (tmp_path / "page.html").write_text(re.sub(r"<meta http-equiv.*?>", "", text))
    _, _, asked = opened(tmp_path / "page.html", tmp_path)
    assert set(asked) == {"http://elsewhere.invalid/picture.png"}, "what is asked for is seen"


@in_browser
@pytest.mark.parametrize(
    ("address", "labels"),
    [
        ("#sort=groups-0:4:ascending", ["z", "lstm", "dense GatedDiagonal"]),
        ("#sort=groups-0:4:descending", ["dense GatedDiagonal", "lstm", "z"]),
        ("#sort=groups-0:0:descending", ["z", "lstm", "dense GatedDiagonal"]),
        ("#sort=groups-0:3:ascending", ["lstm", "dense GatedDiagonal", "z"]),  # z has none, which comes last
        ("#sort=groups-0:3:descending", ["dense GatedDiagonal", "lstm", "z"]),
        ("#sort=groups-9:99:ascending", ["dense GatedDiagonal", "lstm", "z"]),
    ],
)
def test_the_address_sorts_a_table(path: Path, tmp_path: Path, address: str, labels: list[str]) -> None:
    document, console, _ = opened(path, tmp_path, address)
    assert console == []
    assert column(document, "groups-0", 0) == labels
    assert document.count('<th scope="col" class="" data-worst') > 5


@in_browser
def test_clicks_sort_and_hide(path: Path, tmp_path: Path) -> None:
    clicks = """<script>
        const heads = document.querySelectorAll("#groups-0 th button");
        heads[4].click(); heads[4].click();
        document.querySelectorAll("#runs-0 th button")[4].click();
        document.querySelector('.legend input[value="0-1"]').click();
        document.body.dataset.address = location.hash;
    </script></body>"""
    text = re.sub(r"script-src 'sha256-.*?'", "script-src 'unsafe-inline'", path.read_text())
    (tmp_path / "page.html").write_text(text.replace("</body>", clicks))
    document, console, _ = opened(tmp_path / "page.html", tmp_path)
    assert console == []
    assert column(document, "groups-0", 0) == ["z", "lstm", "dense GatedDiagonal"], "best first, then the other way"
    assert column(document, "runs-0", 4) == ["200", "600", "600", "600", "600"], "fewest first"
    assert 'data-address="#sort=runs-0:4:ascending"' in document
    hidden = re.findall(r'class="group hidden" data-group="(.*?)"', document)
    assert set(hidden) == {"0-1"}
    assert len(hidden) == path.read_text().count('data-group="0-1"')


def test_bands_are_over_the_runs_at_the_same_steps() -> None:
    slow = Series(np.array([9, 19, 29]), np.array([60.0, 120.0, 180.0]), np.array([0.0, 0.2, 0.4]))
    fast = Series(np.array([9, 19]), np.array([20.0, 40.0]), np.array([0.5, 1.0]))
    curve = band([slow, fast], "steps", [True, True])
    assert curve.x.tolist() == [10, 20, 30]
    assert curve.mean == pytest.approx([0.25, 0.6, 0.7]), "a finished run keeps its last value"
    assert curve.low == pytest.approx([0, 0.2, 0.4])
    assert curve.high == pytest.approx([0.5, 1, 1])
    assert band([slow, fast], "steps", [True, False]).mean == pytest.approx([0.25, 0.6, 0.4]), "another one ends"
    assert band([slow, fast], "minutes", [True, True]).x == pytest.approx([40 / 60, 80 / 60, 110 / 60])


def test_curves_by_length_are_over_the_runs_that_have_the_length(tmp_path: Path, make_run: MakeRun) -> None:
    make_run(tmp_path / "0", 0, {16: 1.0, 50: 0.5})
    make_run(tmp_path / "1", 1, {16: 0.5, 128: 0.25})
    make_run(tmp_path / "2", 2, finished=False)
    (section,) = sections([read_run(run) for run in find_runs([tmp_path])])
    curve = by_length(section.groups[0], "sequence_accuracy")
    assert curve.x.tolist() == [16, 50, 128]
    assert curve.mean == pytest.approx([0.75, 0.5, 0.25])
    assert curve.low == pytest.approx([0.5, 0.5, 0.25])
    assert curve.high == pytest.approx([1.0, 0.5, 0.25])
