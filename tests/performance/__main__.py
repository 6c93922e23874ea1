"""`make bench`: speed side by side in one run. Quote the ratios; the seconds are this machine's.

python -m tests.performance [decode training]
"""

import sys
from importlib import import_module

from tests.performance.timing import LimitMissed

BENCHMARKS = {
    "decode": "decode_speed", "training": "training_speed", "orchestration": "orchestration",
}  # fmt: skip
"""Module of each; its ``run`` yields lines."""


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
    code = 0
    for name in names:
        print(f"== {name}", flush=True)
        try:
            for line in import_module(f"tests.performance.{BENCHMARKS[name]}").run():
                print(line, flush=True)
        except LimitMissed as missed:
            print(f"MISSED: {missed}", flush=True)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
