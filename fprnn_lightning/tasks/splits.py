"""Which split a sequence belongs to: a hash of its tokens says so, whatever the seed, so that no two splits share one.

1/32 of all sequences are of validation, 1/32 of test. Drawn ones that belong elsewhere are drawn again, which leaves
the distribution within a split as it was. This needs many sequences to choose from, `SPLIT_SPACE` of them.
"""

from collections.abc import Callable

import numpy as np

from fprnn_lightning.tasks.base import Split

SPLIT_SPACE = 2**20
BUCKETS = 32
OWNERS: tuple[Split, ...] = ("validation", "test", "train")  # of bucket 0, of bucket 1, of the others
OWNED = (1, 1, BUCKETS - 2)


def draw_owned(draw: Callable[[int], np.ndarray], split: Split, sequences: int, base: int) -> np.ndarray:
    """Draws until there are enough sequences of a split.

    Args:
        draw: Draws a number of sequences n, (k, n).
        split: "train", "validation" or "test".
        sequences: B, how many.
        base: That of `owner_of`.

    Returns:
        (k, B), the first of the split in the order drawn.
    """
    owner = OWNERS.index(split)
    found = []
    while sum(part.shape[1] for part in found) < sequences:
        drawn = draw(2 * sequences * BUCKETS // OWNED[owner])  # twice as many as are needed on average
        found.append(drawn[:, owner_of(drawn, base) == owner])
    return np.concatenate(found, axis=1)[:, :sequences]


def owner_of(sequences: np.ndarray, base: int) -> np.ndarray:
    """Which split each sequence belongs to, whatever the seed.

    Args:
        sequences: (k, B) tokens below `base`.
        base: Of the numbers, mod 2^64, as which the sequences are read: odd if base^k ≥ 2^64, or the first tokens would
            not count.

    Returns:
        (B,) indices into OWNERS.

    Source: the mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    code = np.zeros(sequences.shape[1], np.uint64)
    for row in sequences:
        code = code * np.uint64(base) + row.astype(np.uint64)
    code = (code ^ (code >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    code = (code ^ (code >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.minimum((code ^ (code >> np.uint64(31))) % np.uint64(BUCKETS), 2)
