"""`seeds` of a sweep: a list or a count, or a form of an extension that adds them in stages."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import TypeAdapter, WrapValidator

from kvlab.own_extensions import explain_missing, find_members
from kvlab.spec import spec_model as spec
from kvlab.spec.seeds_config import Seeds, StagedSeeds

FORMS: tuple[type[StagedSeeds], ...] = tuple(find_members("staged_seeds").values())

_validate_list = partial(TypeAdapter[tuple[int, ...]](Seeds).validate_python, strict=True)


def _validate(value: Any, _handler: Any) -> Any:
    """Validate a mapping as a form, anything else as a list: an error is about one of them."""
    if missing := explain_missing("seeds", value):
        spec.raise_problems([("", missing)])
    return spec.choose_form(FORMS, value, _validate_list)


if TYPE_CHECKING:
    _Seeds = Seeds | StagedSeeds
else:
    _Seeds = Union[(Seeds, *FORMS)]

SeedsField = Annotated[_Seeds, WrapValidator(_validate)]
