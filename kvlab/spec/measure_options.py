"""What the spec and the command line know of a measure of the benchmark, and keys of its own."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvlab.spec.spec_model import Problems, SpecModel


class TextNeed(NamedTuple):
    """Held-out text that a measure needs.

    Attributes:
        key: that asks for it, of its options.
        value: of the key.
        tokens: how many are enough.
    """

    key: str
    value: object
    tokens: int


class MeasureOptions(SpecModel):
    """The keys of one measure, `benchmark.<name>`."""

    def find_length_problems(self, block_size: int) -> Problems:  # noqa: ARG002
        """Yield why it does not fit a model of ``block_size``."""
        yield from ()

    def find_text_need(self, block_size: int) -> TextNeed | None:  # noqa: ARG002
        """Return what it needs of the held-out text; None if it reads none."""
        return None


@dataclass(frozen=True)
class MeasureEntry:
    """One measure of the benchmark, as the spec and the command line know it.

    Attributes:
        module: has ``measure(session)``. It is named, not imported: specs and `kvlab bench
            --help` do not import torch.
        summary: one line of `kvlab bench --help`.
        in_trials: whether a trial always takes it, takes it if `benchmark.parts` names it, or
            takes it if the key of this name is set, such as `benchmark.roofline`.
        is_default: whether `kvlab bench` takes it when none is named; the others need more time
            or more input.
        memory_key: the key of `benchmark` with the bytes that it may use, if it has one; then
            ``added_by`` takes a size.
        added_by: the option of `kvlab bench` that adds it, if there is one.
        reads: further options of `kvlab bench` that it reads, and that do not add it.
        per_batch: whether it decodes with every batch size, whose caches must fit at once.
        is_timed: whether other load on the machine changes its numbers, so that `benchmark.retime`
            takes it again.
        options: of the key of its name, if that has keys. ``added_by`` takes them, too.
        example: a command of `kvlab bench`, without ``kvlab``.
        figures: draws its lines, as ``module:function``; see `kvlab.report.benchmark_plots`.
    """

    module: str
    summary: str
    in_trials: Literal["always", "parts", "key"]
    is_default: bool = False
    memory_key: str = ""
    added_by: str | None = None
    reads: tuple[str, ...] = ()
    per_batch: bool = False
    is_timed: bool = False
    options: type[MeasureOptions] | None = None
    example: str = ""
    figures: str = ""
