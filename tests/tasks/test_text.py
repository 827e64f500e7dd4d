"""Text: splits by position against a naive reader, contexts around the ring, separators, files that are no text."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fprnn_lightning.cli import main
from fprnn_lightning.mixers.lstm import LSTMMixer
from fprnn_lightning.tasks.contexts import spread
from fprnn_lightning.tasks.text import CHUNK, LINE, SEPARATOR, Part, Ring, Text, check_utf8, cut
from fprnn_lightning.training import SequenceLearner

SIZES = dict(batch_size=16, train_length=12, validation_lengths=[4, 12], test_lengths=[8])
SIZES |= dict(validation_sequences=64, test_sequences=64, evaluation_batch_size=16)


def write(folder, **texts):
    """Files <name>.txt; a text is one, or the number of its lines."""
    for name, text in texts.items():
        lines = "".join(f"{name} says {i * i} è così\n" for i in range(text)) if isinstance(text, int) else text
        (folder / f"{name}.txt").write_bytes(lines if isinstance(lines, bytes) else lines.encode())
    return str(folder)


def contexts(batch):
    """Each context with its last target, as bytes; a target that is not scored is the separator."""
    tokens, targets = batch
    targets = targets.where(targets != -100, SEPARATOR)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    return [bytes([*token, target[-1]]) for token, target in zip(tokens.tolist(), targets.tolist(), strict=True)]


def naive_rings(folder, shares=(0.9, 0.95)):
    """The bytes of each split, files whose lines are short."""
    rings = [b"", b"", b""]
    for path in sorted(folder.glob("*.txt")):
        text = path.read_bytes()
        first, second = (text.index(b"\n", round(share * len(text))) + 1 for share in shares)
        for i, part in enumerate((text[:first], text[first:second], text[second:])):
            rings[i] += b"\xff" + part if part else b""
    return dict(zip(("train", "validation", "test"), rings, strict=True))


def test_contexts_are_stretches_of_their_split_alone(tmp_path):
    task = Text(write(tmp_path, a=120, b=90, c=100), **SIZES)
    rings = naive_rings(tmp_path)
    assert sum(map(len, rings.values())) == 9 + sum(path.stat().st_size for path in tmp_path.iterdir())
    for split, ring in rings.items():
        found = [context for index in range(4) for context in contexts(task.batch(split, index))]
        around = ring + ring[:60]
        assert all(context in around for context in found)
        assert len(set(found)) > 40


def test_training_reaches_every_byte_and_wraps_around(tmp_path):
    task = Text(write(tmp_path, a=60, b=60), **SIZES | dict(batch_size=2**15, train_length=9))
    ring = naive_rings(tmp_path)["train"]
    around = ring + ring
    found = set(contexts(task.batch("train", 0)))
    assert found == {around[i : i + 10] for i in range(len(ring))}
    assert ring[-4:] + ring[:6] in found


def test_the_separator_is_given_but_not_scored(tmp_path):
    tokens, targets = Text(write(tmp_path, a=60, b=60), **SIZES | dict(batch_size=512)).batch("train", 0)
    assert (tokens == SEPARATOR).any()
    assert not (targets == SEPARATOR).any()
    assert torch.equal(targets[:, :-1] == -100, tokens[:, 1:] == SEPARATOR)


@given(st.lists(st.binary(min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_a_ring_reads_its_parts_end_to_end(tmp_path_factory, parts, data):
    path = tmp_path_factory.mktemp("ring") / "text"
    path.write_bytes(b"..." + b"".join(parts))
    ends = 3 + np.cumsum([len(part) for part in parts])
    ring = Ring([Part(str(path), end - len(part), end) for part, end in zip(parts, ends.tolist(), strict=True)])
    whole = b"".join(b"\xff" + part for part in parts)
    assert ring.size == len(whole)
    start = data.draw(st.integers(0, ring.size - 1))
    count = data.draw(st.integers(1, 3 * ring.size))
    assert ring.read(start, count).tobytes() == (whole * 5)[start : start + count]


@given(st.text(alphabet="aé€🙂\n", min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_cuts_are_between_lines_or_characters_and_in_order(text, share, later):
    data = np.frombuffer(text.encode(), np.uint8)
    first, second = (cut(data, each) for each in sorted((share, later)))
    assert 0 <= first <= second <= len(data)
    head = data[:first].tobytes().decode()
    assert head.endswith("\n") or "\n" not in text[len(head) :]


def test_long_lines_are_cut_between_characters():
    data = np.frombuffer(("€" * (2 * LINE) + "\n").encode(), np.uint8)
    place = cut(data, 0.1)
    assert abs(place - 0.1 * len(data)) < 4
    assert place % 3 == 0


@given(st.integers(1, 10**6), st.integers(1, 2000))
def test_evaluation_contexts_are_spread_evenly(size, n):
    places = np.sort(spread(np.arange(n), size))
    assert 0 <= places[0] <= places[-1] < size
    assert len(set(places.tolist())) == min(n, size)
    if 2 < n <= size:
        gaps = np.diff(np.append(places, size + places[0]))
        assert gaps.max() <= 4 * size / n + 1


def test_files_folders_and_patterns(tmp_path):
    write(tmp_path, a=100, empty="")
    (tmp_path / "below").mkdir()
    write(tmp_path / "below", b=80)
    (tmp_path / "c.md").write_text("# A title\n" * 100)

    def names(files):
        return {Path(part.path).name for part in Text(files, **SIZES)._rings["train"].parts}

    assert names(str(tmp_path)) == {"a.txt", "b.txt"}
    assert names(str(tmp_path / "a.txt")) == names([str(tmp_path / "a.txt")] * 2) == {"a.txt"}
    assert names(str(tmp_path / "**" / "*.??*")) == {"a.txt", "b.txt", "c.md"}
    assert names([str(tmp_path / "c.md"), str(tmp_path / "below")]) == {"c.md", "b.txt"}
    assert len(names(None)) > 100


@pytest.mark.parametrize(
    ("texts", "files", "sentence"),
    [
        ({}, "absent.txt", "files: absent.txt, there is no such file."),
        ({}, "*.md", r"files: \*.md, there is no such file."),
        ({}, ".", r"files: ., the folder has no \*.txt that is not empty."),
        ({"a": ""}, ".", r"files: ., the folder has no \*.txt that is not empty."),
        ({"a": ""}, "a.txt", "^a.txt: the file is empty."),
        ({}, [], "files must name at least one file."),
        ({"a": "text"}, "", "files: an empty name"),
        (
            {"a": "one line\n"},
            "a.txt",
            r"The files have 10 bytes for train, too few for a context of 12 \(train_length\).",
        ),
        ({"a": 20}, "a.txt", r"bytes for test, too few for a context of 50 \(test_lengths\)."),
        ({"a": b"caf\xe9 au lait\n"}, "a.txt", "^a.txt: byte 3 is not UTF-8, invalid continuation byte."),
        ({"a": "é".encode()[:1]}, "a.txt", "^a.txt: byte 0 is not UTF-8, unexpected end of data."),
        ({"b": 100, "a": b"\x00\xff"}, ".", "^a.txt: byte 1 is not UTF-8, invalid start byte."),
    ],
)
def test_bad_files_are_answered_in_one_sentence(tmp_path, monkeypatch, capsys, texts, files, sentence):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **texts)
    with pytest.raises(ValueError, match=sentence) as error:
        Text(files, **SIZES)
    command = ["fit", "--data", "Text", f"--data.files={files}", "--model.mixer", "LSTMMixer", "--data.train_length=12"]
    assert main(command) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shares", [(0.0, 0.1), (0.1, -0.1), (0.5, 0.5)])
def test_bad_shares(tmp_path, shares):
    with pytest.raises(ValueError, match="must be above 0 and below 1 together, got "):
        Text(write(tmp_path, a=100), *shares, **SIZES)


@pytest.mark.parametrize("place", [CHUNK - 2, CHUNK - 1, CHUNK, CHUNK + 1])
def test_a_character_across_two_chunks(tmp_path, place):
    path = tmp_path / "a.txt"
    text = b"a" * place + "€".encode() + b"a" * 5
    path.write_bytes(text)
    check_utf8(str(path))
    path.write_bytes(text[: place + 2] + b"a" * 5)
    with pytest.raises(ValueError, match=f"byte {place} is not UTF-8"):
        check_utf8(str(path))


def test_bits_per_byte_are_logged(tmp_path, small_trainer):
    task = Text(write(tmp_path, a=120), **SIZES)
    learner = SequenceLearner(LSTMMixer, task.vocab_size, width=8, unit=task.unit)
    trainer = small_trainer(limit_val_batches=1.0)
    for run, split, batches in (
        (trainer.validate, "validation", task.val_dataloader()),
        (trainer.test, "test", task.test_dataloader()),
    ):
        torch.nn.init.zeros_(learner.model.head.weight)
        logged = run(learner, batches, verbose=False)[0]
        targets = torch.cat([targets for _, targets in batches])
        counts = torch.bincount(targets[targets != -100], minlength=256)
        expected = -(learner.model.head.bias.detach().log_softmax(0) * counts).sum() / counts.sum() / math.log(2)
        assert logged[f"{split}/bits_per_byte"] == pytest.approx(expected.item(), rel=1e-5)
