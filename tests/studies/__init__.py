"""Long trials outside of the tests; `python -m tests.studies` lists them."""

import argparse


def read_options(description: str | None, **defaults: object) -> argparse.Namespace:
    """Read the options of a command line: a default gives the type, a tuple several values."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        many = {"nargs": "+"} if isinstance(default, tuple) else {}
        kind = type(default[0] if isinstance(default, tuple) else default)
        parser.add_argument(f"--{name}", type=kind, default=default, **many)
    return parser.parse_args()
