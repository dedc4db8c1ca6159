"""The module that `python -m partita` runs: the same as the `partita` command."""

import sys

from partita.cli import main

if __name__ == "__main__":
    sys.exit(main())
