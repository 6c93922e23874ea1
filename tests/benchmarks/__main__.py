"""`make bench`: speed side by side in one run. Quote the ratios; the seconds are this machine's.

python -m tests.benchmarks [decode past]
"""

import sys

from tests.benchmarks import BENCHMARKS


def main() -> int:
    """Runs the named benchmarks, all of them by default."""
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"{unknown[0]} is not a benchmark; use {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"== {name}", flush=True)
        for line in BENCHMARKS[name]():
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
