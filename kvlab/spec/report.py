"""`report` in a sweep: what its report says. It never enters a fingerprint."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from kvlab.spec.base import NAME_PATTERN, SpecModel, refuse


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ReportConfig(SpecModel):
    """`report`: which sections, in which order.

    The names are those of the table of sections, which stands above this package: the commands
    that read a sweep check them (`kvlab.cli.sweep_file`).
    """

    sections: (
        Annotated[
            tuple[Annotated[str, Field(pattern=NAME_PATTERN)], ...],
            BeforeValidator(_tuple),
            Field(min_length=1),
        ]
        | None
    ) = Field(default=None, description="Names in order; default all that have something to say.")

    def model_post_init(self, _context: Any) -> None:
        names = self.sections or ()
        twice = sorted({name for name in names if names.count(name) > 1})
        refuse(("sections", f"names {name} twice; name each once") for name in twice)
