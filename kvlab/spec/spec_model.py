"""The base class of every spec section, and the field types that the sections share."""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from kvlab.spec.yaml_reader import parse_yaml

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
NAME_RULE = "use 1 to 64 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit"

FieldMessage = tuple[str, str]
"""A field as a dotted path, and what is wrong with its value."""

Problems = Iterator[FieldMessage]


class SpecModel(BaseModel):
    """A frozen section of a spec. Unknown keys and wrong types are errors, never converted.

    Attributes:
        excluded_from_identity: fields that never enter a fingerprint: they change where, when or
            how often something is done, not what comes out.
        omitted_defaults: fields that are newer than the first fingerprints. At its default such a
            field is left out, so that earlier fingerprints keep their value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)
    excluded_from_identity: ClassVar[frozenset[str]] = frozenset()
    omitted_defaults: ClassVar[frozenset[str]] = frozenset()

    def identity(self) -> dict[str, Any]:
        """Return the fields that say what is computed, as plain data."""
        fields = type(self).model_fields
        omitted = {n for n in self.omitted_defaults if getattr(self, n) == fields[n].default}
        return self.model_dump(mode="json", exclude=omitted | self.excluded_from_identity)

    def _find_problems(self) -> Problems:
        """Yield what the fields say against each other. They are valid each by itself."""
        yield from ()

    def identity_of(self, model: Any) -> dict[str, Any]:  # noqa: ARG002
        """Return `identity` in a form that is equal for different spellings of one computation.

        Args:
            model: a `kvlab.spec.model_config.ModelConfig`.
        """
        return self.identity()

    @classmethod
    def of(cls, section: "SpecModel") -> Self:
        """Return a section of an experiment that has these fields, see `own_extensions.extend`."""
        assert isinstance(section, cls), f"{type(section).__name__} has no {cls.__name__}"
        return section

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems(self._find_problems())
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        """Return the JSON Schema, in which the docstring below a field describes it.

        Pydantic's ``use_attribute_docstrings`` reads them when the class is made, which takes
        250 ms over all sections. They are needed for the schema alone.
        """
        written: dict[str, Any] = handler(schema)
        keys = handler.resolve_ref_schema(written)["properties"]
        for base in reversed([one for one in cls.__mro__ if issubclass(one, SpecModel)][:-1]):
            body = ast.parse(inspect.getsource(base)).body[0].body  # type: ignore[attr-defined]
            for field, below in pairwise(body):
                match field, below:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        if own := cls.model_fields.get(name):
                            keys[own.alias or name].update(_read_docstring(text))
        return written


_FACTS = re.compile(
    r"(?P<description>.*?) ?(?:Unit: (?P<unit>.*?)\. )?(?:Default: (?P<computed_default>.*?)\. )?"
    r"Example: (?P<example>.*)"
)


def _read_docstring(text: str) -> dict[str, Any]:
    """Return what the docstring below a field says of it.

    After the description it has the unit of a number (``none`` where it has none), the default if
    that is no constant, and an example that loads, followed by other keys of the section that the
    example needs: ``Unit: tokens. Default: all. Example: 16, kv_dtype: int4``.
    """
    found = _FACTS.fullmatch(" ".join(text.split()))
    if found is None:
        return {"description": " ".join(text.split())}
    facts = {name: fact for name, fact in found.groupdict().items() if fact}
    example, *given = parse_yaml(f"{{value: {facts.pop('example')}}}", "example").data.items()
    return facts | {"examples": [example[1]]} | ({"given": dict(given)} if given else {})


def raise_problems(problems: Iterable[FieldMessage]) -> None:
    """Raise one validation error that carries all ``problems``; do nothing if there are none."""
    if messages := list(problems):
        raise PydanticCustomError("rules", "{text}", {"text": messages[0][1], "rules": messages})


def join_or(names: Iterable[object]) -> str:
    """Return the names as ``a, b or c``."""
    *first, last = map(str, names)
    return f"{', '.join(first)} or {last}" if first else last


@dataclass(frozen=True)
class OneOf:
    """Restrict a string field to the names of a table.

    The table is read at every validation, so a member that is added to it is accepted, offered
    in error messages and listed in the JSON Schema without a second list of names.
    """

    names: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, _schema: Any, _handler: Any) -> dict[str, Any]:
        return {"enum": list(self.names()), "type": "string"}

    def _validate(self, value: Any) -> str:
        if isinstance(value, str) and value in self.names():
            return value
        raise PydanticKnownError("literal_error", {"expected": ", ".join(self.names())})


@dataclass(frozen=True)
class TextRule:
    """Restrict a string field to a regular expression, with a message that says what to write."""

    pattern: str
    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.pattern}

    def _validate(self, value: str) -> str:
        if re.fullmatch(self.pattern, value) is None:
            raise PydanticCustomError("text_rule", "{text}", {"text": self.message})
        return value


def _integral_to_int(value: Any) -> Any:
    """Convert ``10e9``, which YAML reads as a float, to the whole number that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _list_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def normalize_level_name(value: Any) -> Any:
    """Return a level name such as 4 or true as text."""
    return str(value).lower() if isinstance(value, int | bool) else value


def once(what: str) -> AfterValidator:
    """Return the rule that a list has no entry twice; ``what`` is an entry, in words."""

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if any(one in values[:number] for number, one in enumerate(values)):
            raise_problems([("", f"names {what} twice; name each once")])
        return values

    return AfterValidator(check)


def choose_form(
    forms: tuple[type[BaseModel], ...], value: Any, handler: Callable[[Any], Any]
) -> Any:
    """Validate a mapping as the form that knows most of its keys: an error is about one of them.

    Args:
        handler: Validates what is no mapping.
    """
    if isinstance(value, forms):
        return value
    if not isinstance(value, dict) or not forms:
        return handler(value)
    return max(forms, key=lambda one: len(value.keys() & one.model_fields)).model_validate(value)


T = TypeVar("T")
TupleOf = Annotated[tuple[T, ...], BeforeValidator(_list_to_tuple)]
"""A YAML list as a tuple, so that a frozen section stays frozen."""

PositiveInt = Annotated[int, BeforeValidator(_integral_to_int), Field(ge=1, le=10**15)]
NonNegativeInt = Annotated[int, BeforeValidator(_integral_to_int), Field(ge=0, le=10**15)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
DottedKey = Annotated[
    str, TextRule(r"^[^.]+(\.[^.]+)+$", "is not section.key; write one such as model.n_kv_head")
]
Name = Annotated[str, TextRule(NAME_PATTERN, f"is not a usable name; {NAME_RULE}")]
