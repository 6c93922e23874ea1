"""`python -m kvlab`: the `kvlab` command, where its script is not on the path."""

import sys

from kvlab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
