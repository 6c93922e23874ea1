"""What a file of ``extensions:`` imports. See docs/extend.md."""

from typing import Any

from kvlab.own_extensions import explain_missing, find_members
from kvlab.spec.extension_files import Extension as Extension
from kvlab.spec.kv_forms import KVForm as KVForm
from kvlab.spec.kv_forms import StoredVectors as StoredVectors
from kvlab.spec.mixers import Mixer as Mixer
from kvlab.spec.quantizers import Quantizer as Quantizer
from kvlab.spec.source_options import DocumentSource as DocumentSource
from kvlab.spec.source_options import SourceOptions as SourceOptions
from kvlab.spec.spec_model import SpecModel as SpecModel
from kvlab.spec.token_metrics import ScoredTokens as ScoredTokens
from kvlab.spec.token_metrics import TokenMetric as TokenMetric


def __getattr__(name: str) -> Any:
    """Return a base class of members that an extension of kvlab adds.

    Raises:
        ImportError: the extension is not there.
    """
    for base in find_members("file_members").values():
        if base.__name__ == name:
            return base
    if missing := explain_missing(name):
        raise ImportError(f"{name} {missing}")
    raise AttributeError(f"kvlab.extend has no {name}")
