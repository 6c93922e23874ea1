"""`scales` of a sweep: the same question at other sizes, such as a CPU's and a GPU's.

scales:
  gpu:
    experiment: ../experiments/gpt2-124m.yaml
    factors: {horizon: {hybrid: {model.window: 256, model.attention_pattern: GLLLLL}}}

A key of a scale stands in place of the sweep's, and a level in place of the sweep's level. The
cells are the same: a scale says what a level sets, and neither adds nor drops one.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlab.humanize import suggest_name
from kvlab.spec.spec_model import Problems
from kvlab.spec.validation_errors import Path
from kvlab.spec.yaml_reader import YamlDocument

if TYPE_CHECKING:
    from kvlab.spec.sweep import Sweep

SCALED_KEYS = ("experiment", "factors", "tune", "seeds", "search", "decide", "size")
"""Keys of a sweep that a scale may set. The others make the question what it is."""


def find_scale_problems(sweep: "Sweep") -> Problems:
    """Yield keys and levels of scales that the sweep does not have."""
    for name, scale in sweep.scales.items():
        at = f"scales.{name}"
        if not scale:
            yield at, f"changes nothing; write what differs, one of {', '.join(SCALED_KEYS)}"
        for key in scale:
            if key not in SCALED_KEYS:
                yield f"{at}.{key}", f"is no key of a scale; {suggest_name(key, SCALED_KEYS)}"
        for key, other in (("search", "factors"), ("factors", "search")):
            if key in scale and (key == "search") != (sweep.search is not None):
                yield f"{at}.{key}", f"cannot stand in place of the {other} of the sweep; remove it"
        factors = scale.get("factors", {})
        if not isinstance(factors, dict):
            yield f"{at}.factors", "is not a mapping; write levels by factor"
            continue
        for factor, levels in factors.items():
            key, own = f"{at}.factors.{factor}", sweep.factors.get(factor)
            if own is None:
                yield key, f"is not a factor of the sweep; use one of {', '.join(sweep.factors)}"
            elif not isinstance(levels, dict):
                yield key, "is not a mapping; write what a level changes by level"
            else:
                for level in levels.keys() - own.keys():
                    text = f"is not a level of {factor}; use one of {', '.join(own)}"
                    yield f"{key}.{level}", text


def apply_scale(sweep: "Sweep", document: YamlDocument, scale: str) -> YamlDocument:
    """Return the document of a sweep at one of its scales, named ``<sweep>-<scale>``.

    Every key keeps its location in the file, so that a problem is placed at the scale that
    causes it.

    Args:
        sweep: From ``document``, so that its scales name what there is.
    """
    patch = document.data["scales"][scale]
    data = {key: value for key, value in document.data.items() if key != "scales"}
    data = {**data, **patch, "name": f"{sweep.name}-{scale}"}
    sources: dict[Path, Path] = {(key,): ("scales", scale, key) for key in patch}
    if "factors" in patch:
        del sources[("factors",)]
        data["factors"] = {
            factor: {**levels, **patch["factors"].get(factor, {})}
            for factor, levels in document.data["factors"].items()
        }
        for factor, levels in patch["factors"].items():
            for level in levels:
                path = ("factors", factor, level)
                sources[path] = ("scales", scale, *path)
    return replace(document, data=data, moved=sources)
