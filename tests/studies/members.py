"""Every form of K/V and mixer, those of docs/extend too, through what `kvlab check` asks of them.

    python -m tests.studies members --cases 1000

The cases are spread over the members. Each is a random model with a cache, and its logits in chunks,
token by token, in rows of several lengths and in packed documents are those of one pass.
"""

import random
import sys
from pathlib import Path

from pydantic import ValidationError

from kvlab.extensions.check.member_checks import CHECKS, draw_case
from kvlab.spec.experiment import ServedModel
from kvlab.spec.extension_files import Extension, load_extension, read_extension
from kvlab.spec.kv_forms import NAMED_FORMS
from kvlab.spec.mixers import ATTENTION, MIXERS, find_mixer
from tests.studies import read_options

EXAMPLES = Path(__file__).parents[2] / "docs" / "extend"
LATENTS = ({"latent": 12, "rotary": 4}, {"latent": 8, "rotary": 2, "groups": 2})
SLOW = "a training lowers its loss"


def list_members():
    """Return the members by name: of kvlab's own the value of the YAML."""
    found = {name: name for name in NAMED_FORMS}
    found |= {f"latent {number}": dict(one) for number, one in enumerate(LATENTS)}
    found |= {name: find_mixer(name) for name in MIXERS if find_mixer(name) is not ATTENTION}
    for path in sorted(EXAMPLES.glob("*.py")):
        extension: Extension = load_extension(read_extension(path))
        found |= {one.name: one for one in (*extension.kv_forms, *extension.mixers)}
    return found


def draw_served(draw, name, member):
    """Return a random model with a member and how it is served, or None if these do not fit."""
    model, serving = draw_case(draw, member)
    if name in MIXERS:
        model["kinds"]["M"]["mixer"] = name
    try:
        return ServedModel.model_validate({"name": "x", "model": model, "serving": serving})
    except ValidationError:
        return None


def main() -> int:
    """Try the cases; return 1 if one does not hold."""
    options = read_options(__doc__, cases=1000, first=0)
    members, failures = list_members(), 0
    for name, member in members.items():
        draw, tried, largest = random.Random(f"{options.first} {name}"), 0, 0.0
        while tried < -(-options.cases // len(members)):
            case = draw_served(draw, name, member)
            if case is None:
                continue
            tried += 1
            for check, function in CHECKS.items():
                if check == SLOW:
                    continue
                try:
                    largest = max(largest, function(case.model, case.serving))
                except AssertionError as error:
                    failures += 1
                    print(f"{name}: {check}: {error}\n    {case.model_dump(mode='json')}")
        print(f"{name:14} {tried} models, differences up to {largest:.1g}", flush=True)
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
