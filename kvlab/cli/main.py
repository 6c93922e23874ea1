"""The `kvlab` command: parse, call, print. Exit codes: 0 done, 1 look at it, 2 wrong input."""

import argparse
import os
import sys
from importlib import import_module

from kvlab import __version__
from kvlab.cli.commands import COMMANDS
from kvlab.errors import KvlabError


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        options = build_parser(arguments).parse_args(arguments)
        options.words = arguments  # as typed, for a driver that takes them along
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KvlabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `kvlab plan x | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlab",
        description="Ablations of KV-cache reductions: one YAML question, one command, one report.",
    )
    parser.add_argument("--version", action="version", version=f"kvlab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line)
        if name == asked:  # only the asked-for command's module is imported
            implementation = import_module(module)
            implementation.arguments(command)
            command.set_defaults(run=implementation.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
