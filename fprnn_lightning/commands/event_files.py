"""TensorBoard's event files of a run: its scalars by training time, and its HPARAMS, as far as they can be read.

A record of a file is its length (8 bytes), a checksum of that, its content, a checksum of that. TensorBoard's own
reader ends a file at the first damaged record and does not tell; this one passes over it, goes on at the next length
whose checksum is right, and says what is missing. Records of more than 4 kB (figures) are left out.

Each process that trains writes a file of its own. One that goes on from a checkpoint says at which step, and what came
after it in earlier files does not count. The training time of a scalar is

    seconds = (its wall time - wall time of its file's first event) + seconds of the last scalar before that file,

so that neither the time between two processes counts nor work that was lost and done again.
"""

import struct
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

LARGEST = 4096  # bytes of a record that is read
KEPT = ("train/loss", "train/tokens_per_second", "validation/", "test/bits_per_", "length_curve/")
TRAINING = ("train/", "validation/")  # scalars between the first of a file and the last of which training went on


class Series(NamedTuple):
    """A scalar over a run, each (N,).

    Args:
        steps: as logged.
        seconds: of training.
        values: of the scalar.
    """

    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray


class Events(NamedTuple):
    """What a run logged.

    Args:
        scalars: those that a comparison is made of, by their tags.
        hyperparameters: of the HPARAMS tab, by their names; empty if there are none.
        written: wall time of the last event, None if there is none.
        warnings: sentences on what could not be read.
    """

    scalars: dict[str, Series]
    hyperparameters: dict[str, str | float | bool]
    written: float | None
    warnings: list[str]


def read_events(files: list[Path]) -> Events:
    """Reads the event files of a run, in the order of their names."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

    points: dict[str, list[tuple[int, float, float]]] = defaultdict(list)  # steps, seconds, values
    hyperparameters, written, warnings = {}, None, []
    for path in sorted(files):
        try:
            data = path.read_bytes()
        except OSError as error:
            warnings.append(f"{path.name} cannot be read, {error.strerror}")
            continue
        contents, damage = records(data)
        first = offset = None
        for content in contents:
            event = Event.FromString(content)
            now = event.wall_time
            first = now if first is None else first
            kind = event.WhichOneof("what")
            if kind == "session_log" and event.session_log.status == SessionLog.START:
                points = defaultdict(list, {tag: [p for p in old if p[0] < event.step] for tag, old in points.items()})
            for value in event.summary.value if kind == "summary" else ():
                tag = value.tag
                if tag.startswith(KEPT):
                    if offset is None:
                        ends = (old[-1][1] for name, old in points.items() if old and name.startswith(TRAINING))
                        offset = max(ends, default=0.0)
                    points[tag].append((event.step, offset + now - first, value.simple_value))
                elif tag == SESSION_START_INFO_TAG:
                    info = parse_session_start_info_plugin_data(value.metadata.plugin_data.content)
                    hyperparameters |= {
                        name: getattr(each, each.WhichOneof("kind")) for name, each in info.hparams.items()
                    }
        if contents:
            written = now
        if not data:
            warnings.append(f"{path.name} is empty")
        elif damage:
            warnings.append(f"{path.name} is {damage}, {len(contents):,} records of it are used")
    scalars = {tag: Series(*map(np.array, zip(*each, strict=True))) for tag, each in points.items() if each}
    return Events(scalars, hyperparameters, written, warnings)


def records(data: bytes) -> tuple[list[bytes], str]:
    """The contents of a file's whole records of at most 4 kB, and what is wrong with the others, "" if nothing."""
    array = np.frombuffer(data, np.uint8)
    starts, lengths = [], []  # of the records whose lengths are right
    damaged, position, is_cut_off = 0, 0, False
    while position < len(data) and not is_cut_off:
        walk, following = [], []
        while position + 12 <= len(data):
            walk.append(position)
            following.append(struct.unpack_from("<Q", data, position)[0])
            position += 16 + following[-1]
        heads = np.lib.stride_tricks.sliding_window_view(array, 12)[walk] if walk else np.zeros((0, 12), np.uint8)
        wrong = np.flatnonzero(checksums(heads[:, :8]) != stored(heads[:, 8:]))
        right = int(wrong[0]) if len(wrong) else len(walk)
        if len(wrong):
            damaged += 1
            position = _next_length(array, walk[right] + 1)
        elif position != len(data):  # the last record, or its length, goes beyond the end
            is_cut_off = True
            right -= position > len(data)
        starts += walk[:right]
        lengths += following[:right]
    starts, lengths = np.array(starts, np.int64), np.array(lengths, np.int64)
    contents: dict[int, bytes] = {}
    for length in np.unique(lengths[lengths <= LARGEST]):
        first = starts[lengths == length] + 12
        rows = np.lib.stride_tricks.sliding_window_view(array, int(length) + 4)[first]
        right = checksums(rows[:, :-4]) == stored(rows[:, -4:])
        damaged += int((~right).sum())
        contents |= {start: data[start : start + length] for start in first[right].tolist()}
    faults = [f"damaged in {damaged} place{'s' * (damaged > 1)}"] if damaged else []
    faults += ["cut off in its last record"] if is_cut_off else []
    return [contents[start] for start in sorted(contents)], " and ".join(faults)


def stored(rows: np.ndarray) -> np.ndarray:
    """Checksums (N,) of their bytes (N, 4)."""
    return np.ascontiguousarray(rows).view("<u4")[:, 0]


def checksums(rows: np.ndarray) -> np.ndarray:
    """The checksum of each row, CRC-32C as TensorFlow masks it: (N, K) bytes -> (N,)."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in rows.T:
        crc = TABLE[(crc ^ column) & 0xFF] ^ (crc >> 8)
    crc = ~crc
    return ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)


def _next_length(array: np.ndarray, position: int) -> int:
    """The first place from a position on where a length is followed by its checksum; the end if there is none."""
    if position + 12 > len(array):
        return len(array)
    places = np.lib.stride_tricks.sliding_window_view(array[position:], 12)
    found = np.flatnonzero(checksums(places[:, :8]) == stored(places[:, 8:]))
    return position + int(found[0]) if len(found) else len(array)


def _table() -> np.ndarray:
    """The remainders of all bytes by the polynomial of CRC-32C, (256,)."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


TABLE = _table()
