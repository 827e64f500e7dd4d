"""Files that are there whole or not at all: written beside their place, then renamed into it.

Whoever reads sees the old file or the new one, whatever happens to the writer; what a killed writer leaves behind is
one hidden file, which the next one writes over.
"""

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Makes or replaces a file.

    Args:
        path: the file.
        write: writes the whole content to the path that it is given.

    Raises:
        OSError: if that cannot be written, a full disk say; what has been at `path` is still there.
    """
    partial = path.parent / f".{path.name}.partial"
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the new name without the content
        os.replace(partial, path)
    except OSError as error:
        if error.errno and not error.filename:  # the disk is full
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
