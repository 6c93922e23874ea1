"""`kvlab completion`: print a script that completes commands, sweeps, trials and options.

The script asks `kvlab completion candidates WORDS` at every Tab. That imports the module of a
command for its options alone, so that names are there at once.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

from kvlab.cli.commands import COMMANDS
from kvlab.cli.project_folders import default_store, find_project_root

_BASH = """\
_kvlab() {
    local IFS=$'\\n'
    COMPREPLY=( $(kvlab completion candidates "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null) )
}
complete -o default -F _kvlab kvlab
"""

_ZSH = """\
#compdef kvlab
_kvlab() {
    local -a found
    found=("${(@f)$(kvlab completion candidates "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found[1]" ]]; then compadd -a found; else _files; fi
}
compdef _kvlab kvlab
"""

_FISH = """\
function __kvlab_candidates
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -e words[1]
    kvlab completion candidates $words "$current" 2>/dev/null
end
complete -c kvlab -a '(__kvlab_candidates)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

EPILOG = """\
bash: add to ~/.bashrc                     eval "$(kvlab completion bash)"
zsh:  add to ~/.zshrc, after compinit      eval "$(kvlab completion zsh)"
fish: add to ~/.config/fish/config.fish    kvlab completion fish | source
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument(
        "shell", choices=[*SCRIPTS, "candidates"], metavar="SHELL",
        help=f"{', '.join(SCRIPTS)}; or candidates: what may stand for the last of WORDS",
    )  # fmt: skip
    parser.add_argument("typed", nargs=argparse.REMAINDER, metavar="WORDS", help="for candidates")


def run(options: argparse.Namespace) -> int:
    if options.shell in SCRIPTS:
        print(SCRIPTS[options.shell], end="")
        return 0
    for candidate in list_candidates(options.typed or [""]):
        print(candidate)
    return 0


def list_candidates(words: list[str]) -> list[str]:
    """Return what may stand for the last word, given those before it; empty: perhaps a file.

    Args:
        words: As typed after ``kvlab``, the last one perhaps unfinished or empty.
    """
    *before, current = words
    if not before:
        found = list(COMMANDS)
    elif before[0] not in COMMANDS:
        found = []
    elif current.startswith("-"):
        found = [flag for action in _options(before[0]) for flag in action.option_strings]
    else:
        values = _option_values(before)
        found = list(_names(before)) if values is None else values
    return sorted({one for one in found if one.startswith(current)})


def _options(command: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    import_module(COMMANDS[command][0]).add_arguments(parser)
    return parser._actions


def _option_values(before: list[str]) -> list[str] | None:
    """Return the values of the option that was typed last; None if it has none or there is none."""
    if not before[-1].startswith("-") or len(before) < 2:
        return None
    named = [one for one in _options(before[0]) if before[-1] in one.option_strings]
    if not named or named[0].nargs == 0:
        return None
    return [str(value) for value in named[0].choices or ()]


def _names(before: list[str]) -> Iterator[str]:
    """Yield the names that a command takes."""
    for list_names in NAMES.get(before[0], ()):
        yield from list_names(before)


def _store_folder(before: list[str]) -> Path:
    """Return the store as typed, or the default one."""
    for word, value in pairwise(before):
        if word == "--store":
            return Path(value).expanduser()
    stated = [word for word in before if word.startswith("--store=")]
    return Path(stated[0].partition("=")[2] if stated else default_store())


def _list_folders(folder: Path) -> Iterator[str]:
    if folder.is_dir():
        yield from (entry.name for entry in os.scandir(folder) if entry.is_dir())


def list_recorded_sweeps(before: list[str]) -> Iterator[str]:
    """Yield the sweeps of the store."""
    yield from _list_folders(_store_folder(before) / "sweeps")


def list_trials(before: list[str]) -> Iterator[str]:
    """Yield the trials of the store."""
    yield from _list_folders(_store_folder(before) / "trials")


def list_sweep_files(_: list[str]) -> Iterator[str]:
    """Yield the names of the project's sweep files."""
    yield from (file.stem for file in (find_project_root() / "sweeps").glob("*.yaml"))


def list_presets(_: list[str]) -> Iterator[str]:
    """Yield the names of published shapes."""
    from kvlab.spec.presets import PRESETS

    yield from PRESETS


def list_metrics(_: list[str]) -> Iterator[str]:
    """Yield the names of all measurements."""
    from kvlab.store.metrics import METRICS

    yield from METRICS


NAMES: dict[str, tuple[Callable[[list[str]], Iterator[str]], ...]] = {
    "plan": (list_sweep_files,),
    "submit": (list_sweep_files,),
    "status": (list_recorded_sweeps,),
    "stop": (list_recorded_sweeps,),
    "report": (list_recorded_sweeps,),
    "compare": (list_recorded_sweeps,),
    "explain": (list_recorded_sweeps, list_trials),
    "sync": (list_recorded_sweeps,),
    "copy": (list_recorded_sweeps,),
    "verify": (list_recorded_sweeps,),
    "logs": (list_recorded_sweeps, list_trials),
    "generate": (list_trials,),
    "export": (list_trials,),
    "bench": (list_trials, list_presets),
    "estimate": (list_presets,),
    "metrics": (list_metrics,),
    "schema": (lambda _: iter(("experiment", "sweep", "measurement")),),
    "completion": (lambda _: iter(SCRIPTS),),
}
"""Command -> what may stand for its arguments."""
