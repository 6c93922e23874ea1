"""Make the description of a sweep again from a damaged one: from its YAML and the results."""

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError
from kvlab.fs.atomic_files import MAX_JSON_BYTES, read_regular
from kvlab.spec import load_sweep
from kvlab.spec.yaml_reader import read_yaml
from kvlab.store import Store
from kvlab.store.store import list_cells
from kvlab.sweep.planning.planner import describe_stage
from kvlab.sweep.planning.stages import plan_stage
from kvlab.sweep.planning.texts import find_text


def rebuild_description(store: Store, name: str, damaged: Path) -> dict[str, Any] | None:
    """Return what a submit would write in the place of a damaged ``sweep.json``.

    Args:
        store: The record, in which the sweep has no description any more.
        damaged: The damaged file.

    Returns:
        None if it cannot be made here: the YAML itself is damaged, a text is not prepared on this
        machine, the sweep is a search, or trials of the damaged description would be lost.
    """
    try:
        data = read_regular(damaged, MAX_JSON_BYTES)
        found = re.findall(rb'^ "(\w+)": (".*"),?$', data, re.MULTILINE)
        texts = {key.decode(): json.loads(value) for key, value in found}
        text, base = texts["yaml"], texts["experiment_yaml"]
        if hashlib.sha256(text.encode()).hexdigest() != texts["yaml_sha256"]:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "1/2/3/4", f"{name}.yaml")  # the experiment may lie above it
            path.parent.mkdir(parents=True)
            path.write_text(text, encoding="utf-8")
            other = (path.parent / read_yaml(path).data["experiment"]).resolve()
            if not other.is_relative_to(Path(folder).resolve()):
                return None
            other.parent.mkdir(parents=True, exist_ok=True)
            other.write_text(base, encoding="utf-8")
            sweep = load_sweep(path, texts.get("scale", ""))
            is_forged = sweep.name != name or 10 * len(sweep.cells()) > len(data)
            if is_forged or sweep.search is not None:  # of another sweep, or more than it had
                return None
            stage = plan_stage(sweep, store, identify=find_text)
    except (KvlabError, OSError, ValueError, LookupError, TypeError):
        return None
    command = texts.get("command", "")
    description = describe_stage(stage, yaml=text, experiment_yaml=base, command=command)
    planned = {trial for cell in list_cells(description) for trial in cell["trials"].values()}
    listed = {found.decode() for found in re.findall(rb'"([0-9a-f]{16})"', data)}
    lost = listed.intersection(store.trial_ids()) - planned
    return None if stage.plan.absent or lost else description
