"""Studies: what is tried at length, outside of the tests.

python -m tests.studies              lists them
python -m tests.studies NAME ARGS    runs one
"""

import ast
import sys
from importlib import import_module
from pathlib import Path

FILES = {path.stem: path for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))}


def main() -> int:
    """Run the study that is named, or list all; return 2 for a name that none has."""
    if len(sys.argv) > 1:
        name = sys.argv[1]
        if name not in FILES:
            print(f"{name} is not a study; use {', '.join(FILES)}", file=sys.stderr)
            return 2
        del sys.argv[1]
        return import_module(f"tests.studies.{name}").main() or 0
    for name, path in FILES.items():
        text = ast.get_docstring(ast.parse(path.read_text()))
        assert text is not None, f"{path} does not say what it tries"
        print(f"{name:22} {text.splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
