"""Texts that are as they were when somebody looked at them."""

import os
from pathlib import Path


def check_golden(path: Path, text: str, variable: str = "KVLAB_REWRITE_GOLDEN") -> None:
    """Compare a text with a file; write the file again where the environment asks for it."""
    if os.environ.get(variable):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; {variable}=1 writes it again"
