"""Members of tables that a user's file may add to: K/V forms, mixers, text sources.

kvlab's own stand in a table by name. Those of a file are objects, in a spec too: two versions of a
file may be at work in one process.
"""

from collections.abc import Callable
from contextvars import ContextVar
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeVar

from pydantic import SerializationInfo, WrapSerializer, WrapValidator

MemberT = TypeVar("MemberT", bound="Member")


class Member:
    """One member.

    Attributes:
        name: as it is written in a spec.
        source: the user's file that defines it, an `ExtensionFile`; None for kvlab's own.
    """

    name: ClassVar[str]
    source: ClassVar[Any] = None

    def __str__(self) -> str:
        return self.name

    def load(self, place: str) -> Any:
        """Return what ``module:class`` names, or a class beside the member's. It imports torch."""
        module, _, name = place.rpartition(":")
        return resolve_name(f"{module or type(self).__module__}:{name}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A member of a file is pickled with the file, which other processes have not."""
        if self.source is None:
            return super().__reduce_ex__(protocol)
        from kvlab.spec.extension_files import restore_member

        return restore_member, (type(self).__qualname__, self.name, self.source.model_dump())


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


def accept_offered(base: type[MemberT]) -> WrapValidator:
    """Return what turns the name of an offered member into the member."""

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        if isinstance(value, base) and value.source is not None:
            return value
        found = find_offered(base).get(value) if isinstance(value, str) else None
        return handler(value) if found is None else found

    return WrapValidator(validate)


def _dump(value: Any, handler: Callable[[Any], Any], info: SerializationInfo) -> Any:
    if not isinstance(value, Member) or value.source is None:
        return handler(value)
    return value.name if info.mode_is_json() else value


DUMP_OFFERED = WrapSerializer(_dump)
"""Returns a member of a user's file as it is, and as its name in JSON."""
