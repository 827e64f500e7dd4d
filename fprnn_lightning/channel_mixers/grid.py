"""D channels as a grid of d1 rows and d2 columns, row after row: what Kronecker and Monarch mixers work on."""

import math


def rows_and_columns(name: str, channels: int, rows: int | None) -> tuple[int, int]:
    """(d1, d2) with d1 d2 = D; where d1 is not given, as square as possible, d1 <= d2.

    Raises:
        ValueError: if the rows do not divide the channels; the sentence begins with `name`.
    """
    if rows is None:
        rows = next(size for size in range(math.isqrt(channels), 0, -1) if channels % size == 0)
    if rows < 1 or channels % rows:
        raise ValueError(f"{name}: rows is {rows}, must divide the {channels} channels")
    return rows, channels // rows
