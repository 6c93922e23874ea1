"""The `kvlab` command. Exit codes: 0 done, 1 something failed, 2 the input is wrong."""

import argparse
import re
import sys
from importlib import import_module
from typing import NoReturn

from kvlab import __version__
from kvlab.cli.commands import COMMANDS, MODULES
from kvlab.cli.terminal import discard_output, sanitize_output
from kvlab.errors import KvlabError
from kvlab.humanize import suggest_name
from kvlab.oom import classify_oom
from kvlab.own_extensions import explain_missing


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Its arguments; by default those of this process.

    Returns:
        The exit code.
    """
    words = sys.argv[1:] if argv is None else argv
    with sanitize_output():
        try:
            options = build_parser(words).parse_args(words)
            code: int | None = options.run(options)
            sys.stdout.flush()
            return code or 0
        except KvlabError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except ModuleNotFoundError as error:  # on a machine that has torch and little else
            missing = (error.name or "").partition(".")[0]
            if missing in ("", "kvlab"):
                raise
            text = f"{missing} is not installed here, and kvlab {words[0]} needs it; install what"
            print(f"{text} kvlab requires, or use a machine that has it", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:  # nobody reads the output any more, as in `kvlab plan x | head`
            discard_output(sys.stdout)
            return 0
        except Exception as error:
            if classify_oom(error):
                text = f"kvlab {words[0]} ran out of memory"
                print(f"{text}; use a smaller model, batch or text", file=sys.stderr)
                return 1
            extensions = sys.modules.get("kvlab.spec.extension_files")  # of users
            described = extensions and extensions.describe_error(error)
            if not described:
                raise
            print(described, file=sys.stderr)
            return 2


def build_parser(words: list[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands; only the one named in ``words`` has its arguments.

    The modules of the other commands are not imported, so `kvlab --help` stays instant.
    """
    parser = _Parser(
        prog="kvlab",
        description="Ablations of KV-cache reductions: one YAML question, one command, one report.",
    )
    parser.add_argument("--version", action="version", version=f"kvlab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    selected = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == selected:
            implementation = import_module(MODULES.get(name, f"kvlab.cli.commands.{name}"))
            command.epilog = getattr(implementation, "EPILOG", None)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that says which command was meant, and which extension an option needs."""

    def error(self, message: str) -> NoReturn:
        for word in message.partition("unrecognized arguments: ")[2].split():
            if missing := explain_missing(option := word.partition("=")[0]):
                self.exit(2, f"kvlab: {option} {missing}\n")
        unknown = re.search(r"argument COMMAND: invalid choice: '([^']*)'", message)
        if unknown is None:
            super().error(message)
        self.print_usage(sys.stderr)
        if missing := explain_missing("command", unknown[1]):
            self.exit(2, f"kvlab: {unknown[1]} {missing}\n")
        hint = suggest_name(unknown[1], COMMANDS, "see `kvlab --help`", cutoff=0.5)
        self.exit(2, f"kvlab: {unknown[1]} is not a command; {hint}\n")


if __name__ == "__main__":
    sys.exit(main())
