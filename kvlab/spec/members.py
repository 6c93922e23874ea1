"""Members of tables that a user's file may add to, such as K/V forms and text sources.

kvlab's own stand in a table by name. Those of a file are objects, in a spec too: two versions of a
file may be at work in one process.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from contextvars import ContextVar
from functools import partialmethod
from pkgutil import resolve_name
from types import ModuleType
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

from pydantic import SerializationInfo, TypeAdapter, WrapSerializer, WrapValidator

from kvlab.humanize import suggest_name
from kvlab.spec import spec_model as spec
from kvlab.spec.spec_model import SpecModel

MemberT = TypeVar("MemberT", bound="Member")


class Member:
    """One member.

    Attributes:
        name: as it is written in a spec.
        own_names: those of kvlab's own members of the kind, if no table of the core has them.
        source: the user's file that defines it, an `ExtensionFile`; None for kvlab's own.
        options: its settings, of a form or a mixer of a file. The class names a `SpecModel`; the
            member has its defaults, or what the YAML says.
        returns: what its methods must return, by their names.
    """

    name: ClassVar[str]
    own_names: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[Any] = None
    options: ClassVar[Any] = None
    returns: ClassVar[Mapping[str, "Rule"]] = {}

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def checked_servings(self) -> tuple[dict[str, Any], ...]:
        """Each a `serving` that has it, to check it; an empty one for members of models."""
        return ({},)

    def watch(self) -> AbstractContextManager[None]:
        """Return a context in which what is called of it raises AssertionError for a mistake that
        no other check sees."""
        return nullcontext()

    def describe(self) -> str:
        """Return the name, the code and the settings of a member of a file."""
        described = f"{self.name} {self.source.digest}"
        return f"{described} {self.options.model_dump_json()}" if self.options else described

    def find_definition_problem(self, module: ModuleType, text: str) -> str | None:  # noqa: ARG002
        """Return what its file says wrongly of it, and what to write, as in ``has parts = (); name
        some``; None for nothing.

        Args:
            module: as which the file has run.
            text: of the file.
        """
        return None

    def find_place_problem(self, module: ModuleType, field: str) -> str | None:
        """Return what is wrong with a field that names a torch module of the file; or None."""
        place = getattr(self, field, None)
        if ":" in str(place) or (isinstance(place, str) and hasattr(module, place)):
            return None
        return f"has {field} = {place!r}; name a class of this file, a module of torch"

    def load(self, place: str) -> Any:
        """Return what ``module:class`` names, or a class beside the member's. It imports torch."""
        module, _, name = place.rpartition(":")
        return resolve_name(f"{module or type(self).__module__}:{name}")

    def with_options(self, values: Any) -> Self:
        """Return the member with other settings; equal settings give one object.

        Args:
            values: a map, as in YAML.
        """
        if not isinstance(self.options, SpecModel):
            text = f"is a map, and {self.name} takes no settings here; write its name alone"
            spec.raise_problems([("", text)])
        options = read_options(type(self.options), values, self.name, self.name)
        if options == self.options:
            return self
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, options=options)
        return cast(Self, _changed.setdefault((self, options), changed))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A member of a file is pickled with the file, which other processes have not."""
        if self.source is None:
            return super().__reduce_ex__(protocol)
        from kvlab.spec.extension_files import restore_member

        options = self.options.model_dump() if isinstance(self.options, SpecModel) else None
        kind = type(self).__qualname__
        return restore_member, (kind, self.name, self.source.model_dump(), options)


_changed: dict[tuple[Member, SpecModel], Any] = {}


def read_options(own: type[SpecModel], values: Any, of: str, key: str = "") -> SpecModel:
    """Validate the settings of a member of a file.

    Args:
        of: what they are settings of, for errors.
        key: of the map, in the field that is validated; empty if the field is the map.
    """
    unknown = values.keys() - own.model_fields if isinstance(values, dict) else ()
    text = f"is no option of {of}; use {', '.join(own.model_fields)}"
    spec.raise_problems((f"{key}.{one}" if key else str(one), text) for one in unknown)
    if not key:
        return own.model_validate(values)
    map_type: Any = dict[str, own]  # type: ignore[valid-type]
    read = TypeAdapter(map_type).validate_python({key: values})  # whose errors have the key
    return cast(SpecModel, read[key])


Rule = tuple[Callable[[Any, Any], bool], str]
"""What a method must return: a test of a member and of what it returned, and the same in words."""


def is_count(value: Any, least: int = 0) -> bool:
    """Return whether a value is a whole number, and not below ``least``."""
    return isinstance(value, int) and value >= least


WHOLE: Rule = (lambda _member, value: is_count(value), "a whole number, 0 or more")

PROBLEMS: Rule = (
    lambda _member, value: (
        isinstance(value, list | tuple)
        and all(isinstance(one, tuple) and [type(x) for x in one] == [str, str] for one in value)
    ),
    "or yield pairs of a field and a message, such as ('kv', 'needs position: rope')",
)


def check_returns(own: type[Member]) -> None:
    """Let the methods of a class of a user's file raise MemberError where `returns` says so."""
    for name, rule in own.returns.items():
        setattr(own, name, partialmethod(_call, getattr(own, name), name, rule))


def _call(member: Member, method: Callable[..., Any], name: str, rule: Rule, *given: Any) -> Any:
    with redirect_stdout(sys.stderr):  # standard output may be JSON
        value = method(member, *given)
        value = list(value) if isinstance(value, Iterator) else value
    if not rule[0](member, value):
        raise MemberError(member, f"returns {value!r} from {name}; return {rule[1]}")
    return value


class MemberError(Exception):
    """A member of a user's file returned what cannot be used.

    Args:
        member: it, whose class has a line in the file.
        text: what it returned, the rule and the way out.
    """

    def __init__(self, member: Member, text: str):
        super().__init__(f"{type(member).__name__} {text}")
        self.member = member


offered: ContextVar[tuple[Member, ...]] = ContextVar("offered", default=())
"""What users' files add, while an experiment that lists the files is validated."""


def find_offered(base: type[MemberT]) -> dict[str, MemberT]:
    """Return the members of a kind that are offered, by name."""
    return {one.name: one for one in offered.get() if isinstance(one, base)}


class _AcceptOffered(WrapValidator):
    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Return the schema of kvlab's own, and of a name or a map: files are not known to it."""
        own = handler(schema)
        of_file = {"title": "of a user's file", "type": ["string", "object"]}
        return {"anyOf": [*own.get("anyOf", [own]), of_file]}


def accept_offered(base: type[MemberT]) -> WrapValidator:
    """Return what turns the name of an offered member into the member.

    A map of its name to settings gives the member with them.
    """

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        if isinstance(value, base) and value.source is not None:
            return value
        has_settings = isinstance(value, dict) and len(value) == 1
        name, settings = next(iter(value.items())) if has_settings else (value, None)
        members = find_offered(base)
        found = members.get(name) if isinstance(name, str) else None
        if found is None:
            own = [n for n, one in members.items() if isinstance(one.options, SpecModel)]
            if own and has_settings and isinstance(settings, dict):
                text = f"is no {base.__name__} with settings; {suggest_name(name, own)}"
                spec.raise_problems([(str(name), text)])
            return handler(value)
        return found.with_options(settings) if has_settings else found

    return _AcceptOffered(validate)


def name_or_member(base: Any, own_names: Callable[[], Iterable[str]]) -> Any:
    """Return the type of a field that names a member: of kvlab's own, or one that is offered."""
    names = spec.OneOf(lambda: [*own_names(), *find_offered(base)])
    return Annotated[str, names, accept_offered(base), DUMP_OFFERED]


def _dump(value: Any, handler: Callable[[Any], Any], info: SerializationInfo) -> Any:
    if not isinstance(value, Member) or value.source is None:
        return handler(value)
    if not info.mode_is_json():
        return value
    has_settings = isinstance(value.options, SpecModel)
    return {value.name: value.options.model_dump(mode="json")} if has_settings else value.name


DUMP_OFFERED = WrapSerializer(_dump)
"""Returns a member of a user's file as it is, and in JSON as its name, with any settings."""
