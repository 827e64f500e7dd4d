"""python -m fprnn_lightning <subcommand>."""

import sys

from fprnn_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
