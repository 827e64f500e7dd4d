"""python -m fprnn_lightning <subcommand>."""

import os
import sys

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read at import: below it c10d tells of retries, with C++ frames

from fprnn_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
