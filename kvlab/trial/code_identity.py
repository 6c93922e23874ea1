"""Digests of the code that computes: of what trains, and of what measures. Imports no torch.

They are no part of a trial's id. The record has them, so that results of an earlier version of a
module are recognized. A digest is over the syntax trees of modules: comments, docstrings and layout
do not count, and it is the same from every version of Python. The sources are read from where
kvlab is installed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import kvlab
from kvlab.own_extensions import load_parts
from kvlab.syntax_digest import DIGEST_LENGTH, digest_source

_EXTENSIONS = load_parts().values()

Scope = tuple[str, ...]
"""The modules that decide one result: modules, and packages with all that they hold, but for what
is named after a minus. A test follows the imports, and lists what decides nothing."""

TRAINING: Scope = (
    "kvlab.cache.attention_pass", "kvlab.cache.formats", "kvlab.cache.uncached_passes",
    "kvlab.data.batches", "kvlab.model", "-kvlab.model.decode_attention", "-kvlab.model.generate",
    "kvlab.spec.dtypes", "kvlab.spec.kv_forms", "kvlab.spec.layer_config", "kvlab.spec.mixers",
    "kvlab.spec.model_config", "kvlab.spec.quantizers", "kvlab.spec.training_config",
    "kvlab.train", "-kvlab.train.mfu", "-kvlab.train.training_record",
    "kvlab.trial.ddp", "kvlab.trial.initial_weights_loader",
    *(module for parts in _EXTENSIONS for module in parts.training_code),
)  # fmt: skip

MEASUREMENT: Scope = (
    "kvlab.benchmark", "kvlab.cache", "kvlab.data.bigram_table", "kvlab.data.batches",
    "kvlab.data.hellaswag_dataset", "kvlab.data.tokenizers", "kvlab.evaluate",
    "kvlab.layout", "-kvlab.layout.gpu_sharing", "-kvlab.layout.training_memory",
    "kvlab.model", "-kvlab.model.uptraining", "kvlab.spec.benchmark_config",
    "kvlab.spec.dtypes", "kvlab.spec.kv_forms", "kvlab.spec.layer_config",
    "kvlab.spec.measure_options", "kvlab.spec.mixers", "kvlab.spec.model_config",
    "kvlab.spec.quantizers", "kvlab.spec.serving_config", "kvlab.trial.torch_trainable",
    *(module for parts in _EXTENSIONS for module in parts.measurement_code),
)  # fmt: skip


def is_counted(module: str, scope: Scope) -> bool:
    """Return whether a module is in a scope, by its longest prefix there."""
    parts = module.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((one in scope for one in prefixes if {one, f"-{one}"} & {*scope}), False)


class CodeIdentity(NamedTuple):
    """The digests of one version of the code; empty if its sources cannot be read."""

    training: str
    measurement: str


@cache
def this_code() -> CodeIdentity:
    """Return the digests of the code that this process runs.

    They are computed once, before a trial starts: a module that is edited later is not loaded
    again.
    """
    return read_code(Path(kvlab.__file__).parent)


def read_code(package: Path) -> CodeIdentity:
    """Return the digests of the sources in a folder that holds the package kvlab."""
    lines: dict[Scope, list[str]] = {TRAINING: [], MEASUREMENT: []}
    try:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            module = ".".join(parts).removesuffix(".__init__")
            if scopes := [scope for scope in lines if is_counted(module, scope)]:
                line = f"{module} {digest_source(path.read_bytes())}\n"
                for scope in scopes:
                    lines[scope].append(line)
    except (OSError, SyntaxError, ValueError):
        return CodeIdentity("", "")
    if not any(lines.values()):  # compiled files alone
        return CodeIdentity("", "")
    digests = (hashlib.sha256("".join(own).encode()).hexdigest() for own in lines.values())
    return CodeIdentity(*(found[:DIGEST_LENGTH] for found in digests))


# The code of a trial


CodeState = Literal["same", "other", "unknown"]
"""``unknown``: of a record from before the code was noted."""


@dataclass(frozen=True)
class TrialCode:
    """The code of one trial; an empty digest is not known.

    Attributes:
        training: All code that its weights come from: of the training, of the stable phase that
            it branched from, and of the training that it started from.
        measurement: The code that measured it.
    """

    training: tuple[str, ...] = ("",)
    measurement: str = ""

    @classmethod
    def of(cls, code: Mapping[str, Any] | None) -> "TrialCode":
        """Return the code that the provenance of a result names, from `Store.code`."""
        return cls() if code is None else cls(tuple(code["training"]), code["measurement"])

    def compare(self) -> CodeState:
        """Return whether this is the code of this process, or another one."""
        if not any((*self.training, self.measurement)):
            return "unknown"
        now = this_code()
        both = [
            *((one, now.training) for one in self.training),
            (self.measurement, now.measurement),
        ]
        if any(one and own and one != own for one, own in both):
            return "other"
        return "same" if all(one and own for one, own in both) else "unknown"
