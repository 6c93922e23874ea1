"""Which code of users' files this machine has run, so that it runs again from a record.

A record that comes from elsewhere brings code with it. It is run when somebody has run the same
text here: from the file that a YAML names, or by ``kvlab check``.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvlab.data.data_dir import get_data_dir
from kvlab.spec.extension_files import trust


def remember_extensions(texts: Iterable[str]) -> None:
    """Note that these texts were run here."""
    for text in texts:
        path = _find_note(text)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def trust_known(experiment: Mapping[str, Any]) -> list[str]:
    """Let this process run the extensions of a recorded experiment that were run here before.

    Returns:
        The names of the others.
    """
    extensions = experiment.get("extensions") or {}
    known = {name: text for name, text in extensions.items() if _find_note(text).exists()}
    trust(*known.values())
    return [name for name in extensions if name not in known]


def _find_note(text: str) -> Path:
    return get_data_dir() / "extensions" / hashlib.sha256(text.encode()).hexdigest()
