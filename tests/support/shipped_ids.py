"""The trials of every shipped sweep, or why it is refused; a JSON object on standard output.

    python -m tests.support.shipped_ids FOLDER

FOLDER has experiments/ and sweeps/. With ``--imports`` every module of kvlab is imported, too.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import kvlab
from kvlab.cli import shared_arguments as shared
from kvlab.errors import KvlabError
from kvlab.store import Store
from kvlab.sweep import plan_stage


def list_trials(folder: Path) -> dict[str, list[str] | str]:
    """Return the ids of the trials of each sweep by its file, or the message of its error."""
    found: dict[str, list[str] | str] = {}
    for path in sorted((folder / "sweeps").glob("*.yaml")):
        try:
            sweep = shared.read_sweep(str(path), None)
            plan = plan_stage(sweep, Store(folder / "no-store"), provisional=True).plan
            found[path.name] = [f"{one.trial.id} {one.trial.training_id}" for one in plan.trials]
        except KvlabError as error:
            found[path.name] = str(error)
    return found


def find_broken_modules() -> list[str]:
    """Return the modules of kvlab that cannot be imported here, but for want of triton."""
    broken = []
    for module in walk_packages(kvlab.__path__, "kvlab."):
        try:
            if not module.name.endswith("__main__"):
                import_module(module.name)
        except ImportError as error:
            if error.name != "triton":
                broken.append(f"{module.name}: {error}")
    return broken


if __name__ == "__main__":
    trials = list_trials(Path(sys.argv[1]))
    broken = find_broken_modules() if "--imports" in sys.argv else []
    print(json.dumps({"trials": trials, "broken": broken}))
