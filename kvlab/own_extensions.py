"""kvlab's own extensions: folders of `kvlab/extensions`, and what each adds to the core.

A folder has a module ``parts.py``, whose ``PARTS`` names all that it adds. A folder that is not
there adds nothing, and what a YAML asks of it is refused with its name. Nothing else in the core
knows an extension.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path
from types import new_class
from typing import Any, NamedTuple, TypeVar, cast

ModelT = TypeVar("ModelT")
ItemT = TypeVar("ItemT")

FOLDER = Path(__file__).parent / "extensions"

_FINEWEB_EDU = ("10b", "100b", "350b", "crawl")

TABLE: dict[str, tuple[str, ...]] = {
    "bench": ("command: bench",),
    "check": ("command: check",),
    "comparison": ("command: compare",),
    "conversations": ("benchmark.conversations", "--load"),
    "copy": ("command: copy", "--copy-to"),
    "datasets": ("command: data",),
    "doctor": ("command: doctor",),
    "estimate": ("command: estimate",),
    "eviction": ("serving.evict", "eviction_policies", "EvictionPolicy"),
    "expected_precision": (),
    "explain": ("command: explain", "--why"),
    "findings": ("command: findings",),
    "fineweb_edu": ("data.subset", *(f"data.source: fineweb-edu-{k}" for k in _FINEWEB_EDU)),
    "gc": ("command: gc",),
    "generate": ("command: generate",),
    "int8_training": ("training.int8",),
    "kivi": ("kv_residual", *(f"kv_dtype{k}: kivi{n}" for k in ("", ".k", ".v") for n in (4, 2))),
    "kv_routing": ("training.kv_routing",),
    "latent_kv": ("kv.latent", "preset: deepseek-v2-lite", "preset: deepseek-v3"),
    "limit": ("benchmark.memory", "benchmark.parts: limit", "--limit"),
    "linear_attention": ("mixer: gated_delta", "attention_pattern: D"),
    "live_page": ("command: live",),
    "lm_eval": ("evaluation.lm_eval",),
    "looks": ("seeds.looks",),
    "mix": ("data.mix", "data.source: mix"),
    "muon": ("training.optimizer: muon",),
    "notify": ("--notify",),
    "paper": ("command: paper",),
    "probes": ("evaluation.recall", "evaluation.needle"),
    "published_weights": ("command: export", "published weights"),
    "recall": ("data.recall", "data.source: recall", "data.mix.recall"),
    "reference": ("command: metrics", "command: schema"),
    "rotation": ("serving.kv_rotate: hadamard",),
    "scaling": ("size",),
    "search": ("search",),
    "tied_kv": ("model.kv: tied", "model.kv: rotated_tied", "model.kv: grouped_tied"),
    "tuning": ("tune",),
}
"""Extension -> the keys, values of keys, and options of commands that need it; commands as values
of `command`."""


class SectionPart(NamedTuple):
    """A section of a design's report.

    Attributes:
        after: the section that it comes after.
        make: a function of a `Study`, as ``module:function``.
        compares_quality: see `kvlab.report.sections.SectionEntry`.
    """

    name: str
    after: str
    make: str
    compares_quality: bool = True


class CommandPart(NamedTuple):
    """A command of `kvlab`.

    Attributes:
        after: the command that it comes after in the help.
        module: see `kvlab.cli.commands`.
    """

    name: str
    after: str
    summary: str
    module: str = ".command"


@dataclass(frozen=True)
class Parts:
    """What an extension adds. Each part is optional, and named as ``module:object``.

    A module that begins with a dot is one of its folder.

    Its metrics are in ``metrics.toml`` beside it, see `kvlab.store.metrics`.

    Attributes:
        fields: section of an experiment, or ``sweep`` -> a `SpecModel` whose fields it has, too.
            They have defaults, and `SpecModel.omitted_defaults` names them.
        problems: a function of an experiment that yields what the fields say against others, by
            dotted keys.
        file_problems: a function of an experiment that yields the files that it names and cannot
            read, when a sweep is loaded: a dotted key, and what follows it in the message.
        members: table of the core -> name -> its entry there, or plain text where the table has it;
            what the core asks of one extension by role, such as ``searcher``, is a table of roles.
        sections: those of the report.
        commands: those of `kvlab`.
        evaluations: functions that measure a trained model, see
            `kvlab.evaluate.evaluation.measure_extensions`.
        losses: functions that divide a measured loss, see
            `kvlab.evaluate.evaluation.divide_losses`.
        lines: keys of `result.json` under which these keep lists of lines of numbers.
        details: names of the objects that these keep in ``<name>.json.gz`` beside a result.
        training_code, measurement_code: modules whose code decides what a training and a
            measurement compute, see `kvlab.trial.code_identity`.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    problems: str = ""
    file_problems: str = ""
    members: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    sections: tuple[SectionPart, ...] = ()
    commands: tuple[CommandPart, ...] = ()
    evaluations: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    training_code: tuple[str, ...] = ()
    measurement_code: tuple[str, ...] = ()


@cache
def load_parts() -> dict[str, Parts]:
    """Return what each extension that is there adds, in the order of the table.

    Only their modules ``parts`` run, so that `kvlab --help` does not import `kvlab.spec`.
    """
    paths = {name: FOLDER / name / "parts.py" for name in TABLE}
    return {
        name: Parts(**_place(vars(run_path(str(path))["PARTS"]), f"kvlab.extensions.{name}"))
        for name, path in paths.items()
        if path.is_file()
    }


def _place(value: Any, folder: str) -> Any:
    """Return a part of `Parts` with the whole names of the modules of its folder."""
    match value:
        case str():
            return f"{folder}{value}" if value.startswith(".") else value
        case dict():
            return {_place(key, folder): _place(one, folder) for key, one in value.items()}
        case tuple():
            placed = (_place(one, folder) for one in value)
            return type(value)(*placed) if hasattr(value, "_fields") else tuple(placed)
    return value


def name_members(table: str) -> dict[str, str]:
    """Return the places of what extensions add to a table, by name."""
    parts = load_parts().values()
    return {k: v for one in parts for k, v in one.members.get(table, {}).items()}


def find_members(table: str) -> dict[str, Any]:
    """Return what extensions add to a table, by name."""
    return {name: resolve_name(place) for name, place in name_members(table).items()}


def find_member(table: str, name: str) -> Any:
    """Return what an extension adds to a table under a name.

    Raises:
        KeyError: No extension that is there adds it.
    """
    return resolve_name(name_members(table)[name])


def import_late(place: str) -> Callable[..., Any]:
    """Return the function ``module:function``, which is imported when it is called."""
    return lambda *arguments: resolve_name(place)(*arguments)


def find_files(name: str) -> list[Path]:
    """Return the files of this name in the folders of extensions."""
    return [path for one in load_parts() if (path := FOLDER / one / name).is_file()]


def insert_after(
    items: Mapping[str, ItemT], after: str, added: Mapping[str, ItemT]
) -> dict[str, ItemT]:
    """Return items with others behind one of them, or behind all if it is not there."""
    before = list(items)[: 1 + list(items).index(after) if after in items else None]
    return {name: items[name] for name in before} | dict(added) | dict(items)


def extend(section: str) -> Callable[[type[ModelT]], type[ModelT]]:
    """Return a decorator that adds the fields of extensions to a section's class, after its own."""

    def decorate(core: type[ModelT]) -> type[ModelT]:
        names = [one.fields[section] for one in load_parts().values() if section in one.fields]
        if not names:
            return core
        bases, joined = (*map(resolve_name, names), core), {}
        for name in ("omitted_defaults", "excluded_from_identity"):
            joined[name] = frozenset().union(*(getattr(base, name) for base in bases))
        # the last one is where Python 3.13 and later look for a class's source
        keys = ("__module__", "__qualname__", "__doc__", "__firstlineno__")
        about = {key: getattr(core, key) for key in keys if hasattr(core, key)}
        made = new_class(core.__name__, bases, exec_body=lambda body: body.update(about | joined))
        return cast("type[ModelT]", made)

    return decorate


def find_problems(experiment: Any) -> Iterator[tuple[str, str]]:
    """Yield what fields of extensions say against others."""
    for one in load_parts().values():
        if one.problems:
            yield from resolve_name(one.problems)(experiment)


def find_file_problems(experiment: Any) -> Iterator[tuple[str, str]]:
    """Yield which files of extensions cannot be read, and why."""
    for one in load_parts().values():
        if one.file_problems:
            yield from resolve_name(one.file_problems)(experiment)


def find_needed(experiment: Mapping[str, Any]) -> str | None:
    """Return which extension the experiment of a record needs; None if none is missing."""
    settings = (
        explain_missing(f"{section}.{key}", value)
        for section, fields in experiment.items()
        if isinstance(fields, Mapping)
        for key, value in fields.items()
        if value
    )
    return next(filter(None, settings), None)


def explain_missing(key: str, value: object = None) -> str | None:
    """Return which extension a key or its value needs; None if none is missing.

    Args:
        value: of a mapping its keys count, too.
    """
    keys = [key, *(f"{key}.{inner}" for inner in value)] if isinstance(value, Mapping) else [key]
    for name, needs in TABLE.items():
        if name in load_parts():
            continue
        for place, _, wanted in (need.partition(": ") for need in needs):
            is_named = any(f".{one}".endswith(f".{place}") for one in keys)
            if is_named and wanted in ("", str(value)):
                return f"needs kvlab/extensions/{name}, which is not installed; leave it out"
    return None
