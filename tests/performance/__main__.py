"""`make bench`: speed side by side in one run. Quote the ratios; the seconds are this machine's.

python -m tests.performance [decode roofline]
"""

import sys

from tests.performance import BENCHMARKS
from tests.performance.timing import LimitMissed


def main() -> int:
    """Run the named benchmarks, by default all.

    Returns:
        1 if one of them missed its limit (the others run all the same), 2 for an unknown name.
    """
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"{unknown[0]} is not a benchmark; use {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    return max([_run(name) for name in names])


def _run(name: str) -> int:
    print(f"== {name}", flush=True)
    try:
        for line in BENCHMARKS[name]():
            print(line, flush=True)
    except LimitMissed as missed:
        print(f"MISSED: {missed}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
