"""What every spec model shares: frozen, no unknown keys, no silent conversions."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
NAME_RULE = "use 1 to 64 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit"


class SpecModel(BaseModel):
    """A frozen part of a spec. Unknown keys and wrong types are refused, never converted.

    ``not_identity`` names the fields that never enter a fingerprint: they change where, when
    or how often something is done, not what comes out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    not_identity: ClassVar[frozenset[str]] = frozenset()

    def identity(self) -> dict[str, Any]:
        """The fields that say what is computed, as plain data."""
        data = self.model_dump(mode="json")
        return {key: value for key, value in data.items() if key not in self.not_identity}


def raise_problems(problems: Iterable[tuple[str, str]]) -> None:
    """Raises one validation error that carries every ``(field, message)`` given."""
    found = list(problems)
    if found:
        raise PydanticCustomError("rules", "{text}", {"text": found[0][1], "rules": found})


def _integral_to_int(value: Any) -> Any:
    """``10e9`` is a whole number though YAML reads a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def normalize_level_name(value: Any) -> Any:
    """Level names such as 4 or true are names, not numbers."""
    return str(value).lower() if isinstance(value, int | bool) else value


PositiveInt = Annotated[int, BeforeValidator(_integral_to_int), Field(ge=1, le=10**15)]
NonNegativeInt = Annotated[int, BeforeValidator(_integral_to_int), Field(ge=0, le=10**15)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
