"""A sweep's file, read and checked against what the packages above the specs know."""

from pathlib import Path

from kvlab.errors import Problem, SpecError
from kvlab.spec import Sweep, load_sweep


def read_sweep(path: str | Path) -> Sweep:
    """As `load_sweep`; the sections of its report exist too.

    Raises:
        SpecError: with every problem found, each with file, line and column.
    """
    sweep = load_sweep(path)
    if sweep.report.sections:
        problems = _section_problems(sweep, sweep.report.sections)
        if problems:
            raise SpecError(problems)
    return sweep


def _section_problems(sweep: Sweep, names: tuple[str, ...]) -> list[Problem]:
    from kvlab.report.sections import SECTIONS, unknown_section  # sweeps that pick none wait not

    document = sweep.source.document
    return [
        document.problem(
            ("report", "sections", number),
            f"report.sections.{number} = {name} {unknown_section(name)}",
        )
        for number, name in enumerate(names)
        if name not in SECTIONS
    ]
