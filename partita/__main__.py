"""The module that runs: what does `python -m partita` do? The same as the `partita` command."""

import sys

from partita.cli import main

if __name__ == "__main__":
    sys.exit(main())
