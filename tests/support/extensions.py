"""Tests that need an extension, which `python -m tests.studies deletion` deletes."""

from pathlib import Path

import pytest

from kvlab.errors import KvlabError
from kvlab.own_extensions import TABLE, load_parts
from kvlab.spec import load_sweep


def find_missing(names: str) -> set[str]:
    """Return which of some extensions are deleted: names with blanks between them, or ``all``."""
    return set(TABLE if names == "all" else names.split()) - load_parts().keys()


TRIED_WITH = {"mix": "recall"}
"""Extensions whose tests all need another one."""


def is_tried(name: str) -> bool:
    """Return whether what the tests of an extension need is there."""
    return not find_missing(TRIED_WITH.get(name, ""))


def needs(names: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test or a case of it without these extensions.

    It is for what tests an extension together with another one. `test_deletion.py` shows that none
    is missing where nothing is deleted.
    """
    missing = find_missing(names)
    return pytest.mark.skipif(bool(missing), reason=f"without {', '.join(sorted(missing))}")


def skip_refused(sweep: Path) -> None:
    """Skip a test of a sweep's record if the sweep is refused for want of an extension."""
    try:
        load_sweep(sweep)
    except KvlabError as error:
        if any(f"needs kvlab/extensions/{name}," in str(error) for name in find_missing("all")):
            pytest.skip(str(error))
