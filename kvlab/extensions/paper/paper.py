"""`kvlab paper`: write what a paper needs of a sweep: a table, figures, methods, references.

The texts are templates in `latex/`, whose fields are filled with the numbers of the
record. A sentence, one line of `methods.tex`, is left out if one of its fields has no value.
`terms.tex` says which methods are named, and cited, where the record shows their use. The files
follow from the record alone: the same record gives the same bytes, PDF files included.
"""

import argparse
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlab.analysis.search_results import SearchResults
from kvlab.analysis.study import GAP_ROUNDING, Study
from kvlab.cli import shared_arguments as shared
from kvlab.cli.terminal import print_result
from kvlab.errors import UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.humanize import format_count, format_duration, format_number
from kvlab.own_extensions import find_files, find_member
from kvlab.report import formatting as fmt
from kvlab.report import table_export as tex
from kvlab.report.document import Document, Plot, Table
from kvlab.report.figures import draw_plot, figure_style
from kvlab.report.overview import ablation_table
from kvlab.report.report_files import make_document
from kvlab.spec.designs import DESIGNS
from kvlab.spec.dtypes import DTYPES, BlockDType
from kvlab.spec.kv_forms import NAMED_FORMS
from kvlab.spec.search_config import format_setting, short_keys, split_sampler
from kvlab.store.metrics import METRICS
from kvlab.store.record_forms import refuse_malformed

PAGE_WIDTH = 6.75
"""Inches of both columns with the space between them."""

MAX_ROWS = 16
"""Configurations of a search in the table: what half a column holds."""

DRAWN_FIGURES = ("pareto", "effects", "curves", "history-.*", "front-.*")
"""Figures of a report that a paper gets, in order; the last two are those of a search."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_record(parser, "name or file of a submitted sweep", archive=True)
    text = "folder of the paper; the sweep's files are in one of its name"
    parser.add_argument("folder", metavar="DIR", help=text)
    text = "column (3.25 in), page (6.75 in) or inches (default: column)"
    parser.add_argument("--width", type=parse_width, metavar="WIDTH", default="column", help=text)


def parse_width(text: str) -> float:
    """Parse the width of a paper's figures: a name, or inches."""
    width = {"column": tex.COLUMN_WIDTH, "page": PAGE_WIDTH}.get(text) or shared.parse_number(text)
    if not 2 <= width <= 12:
        rule = "is not column, page or a number of inches from 2 to 12"
        raise argparse.ArgumentTypeError(f"{text} {rule}")
    return width


def run(options: argparse.Namespace) -> None:
    name, folder = shared.sweep_name(options.sweep), Path(options.folder)
    study = Study.load(shared.open_store(options.store), name)
    if study.search is not None and not study.search.eligible:
        rule = "a paper shows a measured configuration within the limits"
        raise UsageError(f"{name} has none, and {rule}; submit the search again to go on")
    if not study.done_rows:
        raise UsageError(f"no trial of {name} is done, and a paper shows results; run one first")
    with refuse_malformed(name):
        write_paper(study, make_document(study), folder, options.width)
    parts = sorted(path.name for path in (folder / name).glob("*.*"))
    text = f"{folder / name}: {', '.join(parts)}\n{folder / 'main.tex'} shows them: pdflatex main"
    text += " && bibtex main, then pdflatex main twice"
    print_result(options, {"sweep": name, "paper": str(folder), "files": parts}, text)


def write_paper(
    study: Study, document: Document, folder: Path, width: float = tex.COLUMN_WIDTH
) -> None:
    """Write the files of a sweep, and ``main.tex`` if the folder has none.

    Args:
        folder: The folder of the paper. The files of the sweep are in ``folder/<its name>/``. A
            ``main.tex`` that is there is never replaced.
        width: Width of the table and of the figures, in inches.
    """
    own, main = folder / study.name, folder / "main.tex"
    drawn = [f for name in DRAWN_FIGURES for f in document.figures if re.fullmatch(name, f.name)]
    table = "ablation" if study.search is None else "configurations"
    floats = []
    contents: dict[Path, str | bytes] = {}
    for figure in drawn:
        path = own / "figures" / f"{figure.name}.pdf"
        contents[path] = render_pdf(figure.plot, figure.name, width)
        # the caption of a search's figure has the numbers that it shows
        caption = tex.escape_prose(figure.caption if study.search is None else figure.alt)
        fields = {"sweep": study.name, "name": figure.name, "caption": caption}
        star = "*" if width > tex.COLUMN_WIDTH else ""
        floats.append(tex.fill_latex(read_latex("figure.tex"), fields | {"star": star}))
    texts = {
        f"{table}.tex": write_table(study, width),
        "figures.tex": "\n".join(floats),
        "methods.tex": write_methods(study),
    }
    entries = re.findall(r"^(@\w+\{([^,]+),.*?^\}\n)", read_latex("references.bib"), re.M | re.S)
    known = {key: entry for entry, key in entries}
    cited = list_citations("".join(texts.values()))
    texts["references.bib"] = "\n".join(known[key] for key in cited)
    contents |= {own / name: text for name, text in texts.items()}
    if not main.exists():
        title = tex.escape_latex(str(study.sweep.get("question") or study.name))
        fields = {"title": title, "sweep": study.name, "table": table}
        contents[main] = tex.fill_latex(read_latex("main.tex"), fields)
    for path, content in contents.items():
        write_atomic(path, content)
    for path in (own / "figures").glob("*.pdf"):
        if path not in contents:  # of an earlier report
            path.unlink()


def read_latex(name: str) -> str:
    """Return a template, or a file of terms or references with those of other extensions."""
    paths = (Path(__file__).parent / "latex" / name, *find_files(name))
    return "".join(path.read_text("utf-8") for path in paths)


def render_pdf(plot: Plot, name: str, width: float) -> bytes:
    """Render a plot as one PDF page, with text of 8 pt and fonts embedded as TrueType.

    Args:
        width: Width of the page, in inches.
    """
    with figure_style(name, "paper"):
        figure, pdf = draw_plot(plot, width), io.BytesIO()
        no_metadata = {"CreationDate": None, "Creator": None, "Producer": None}
        figure.savefig(pdf, format="pdf", metadata=no_metadata)
    return pdf.getvalue()


def list_citations(text: str) -> list[str]:
    """Return the keys that LaTeX cites, sorted."""
    cited = re.findall(r"\\cite\{([^}]*)\}", text)
    return sorted({key for keys in cited for key in keys.split(",")})


def write_table(study: Study, width: float) -> str:
    """Return the main table, as wide as so many inches: the ablation, or the best of a search."""
    table = _ablation(study) if study.search is None else _best_trials(study, study.search)
    return tex.table_to_latex(table, f"{study.name}-{table.name}", width)


def _best_trials(study: Study, search: SearchResults) -> Table:
    """Return the front of several objectives, or the best in one."""
    is_front, tables = len(search.objectives) > 1, find_member("search", "tables")
    trials = (list(search.best) if is_front else search.ranked(0))[:MAX_ROWS]
    goals = " and ".join(tables.objective_title(one.name) for one in search.objectives)
    caption = (
        f"{format_count(len(trials), 'configuration')}"
        f" {'on the front of' if is_front else 'with the best'} {goals}, each trained once: the"
        " best is flattered by its selection."
    )
    return _drop_column(tables.trials_table(study, search, "configurations", caption, trials), "id")


def _drop_column(table: Table, title: str) -> Table:
    columns = (replace(one, is_csv_only=one.title == title) for one in table.shown.columns)
    return replace(table.shown, columns=tuple(columns)).shown


def _ablation(study: Study) -> Table:
    """Return the ablation with short heads, and differences in bold where one is decided."""
    table = ablation_table(study)
    verdict = [column.title for column in table.columns].index("verdict")
    rows = []
    for row in table.rows:
        cells = list(row.cells)
        cells[verdict - 2] = replace(cells[verdict - 2], tone=cells[verdict].tone)
        rows.append(replace(row, cells=tuple(cells)))
    columns = []
    for column in table.columns:
        head = re.sub(r"^simultaneous (\S+)$", r"\1 CI", re.sub(r" \(.*\)$", "", column.title))
        columns.append(replace(column, title=_HEADS.get(head, head)))
    unit = fmt.difference_unit(study.primary_metric)
    caption = table.caption + (f" Differences are in {unit}." if unit else "")
    table = replace(table, columns=tuple(columns), rows=tuple(rows), caption=caption)
    return _drop_column(table, "verdict")


_HEADS = {
    "against baseline": "difference", "against it": "difference",
    "K/V cache": "cache", "parameters": "params", "serving gap": "gap",
}  # fmt: skip
"""Heads of the report's table -> those of a table as wide as a column."""


# Methods


def write_methods(study: Study) -> str:
    """Return paragraphs about models, training, statistics and machines."""
    made = {**_record_fields(study), **_study_fields(study), **_search_fields(study)}
    fields = {name: text for name, text in made.items() if text or name.startswith("if_")}
    terms: dict[str, list[str]] = {}
    features = {*_find_features(study), f"sampler={fields.get('sampler')}"}
    features.add(f"pruning={fields.get('pruning_rule')}")
    lines = read_latex("terms.tex").splitlines()
    for line in sorted(lines, key=lambda line: ": else | " in line):  # after those of extensions
        if not line.startswith("%"):
            field, feature, words = re.split(r": | \| ", line, maxsplit=2)
            known = terms.setdefault(field, [])
            if feature in features or (feature == "else" and not known):
                known += {fill_sentence(words, fields)} - {"", *known}
    fields |= {field: join(words) for field, words in terms.items() if words}
    paragraphs: list[list[str]] = []
    for line in read_latex("methods.tex").splitlines():
        if line.startswith("\\paragraph"):
            paragraphs.append([line])
        elif sentence := fill_sentence(line, fields):
            paragraphs[-1].append(sentence)
    return "\n".join("\n".join(one) + "\n" for one in paragraphs if len(one) > 1)


_SCORED = {
    "loss_served": "served_tokens", "bits_per_byte": "loss_tokens",
    "bits_per_byte_served": "served_tokens",
}  # fmt: skip
"""Metrics whose number of tokens is not their own name with ``_tokens``."""


def _settings(study: Study) -> Iterator[tuple[str, Any]]:
    """Yield ``section.key`` and value of each setting, with those of a map in it, and how many
    tokens were trained on and scored."""
    metric = study.primary_metric
    scored = _SCORED.get(metric, f"{metric}_tokens")
    for row in study.done_rows:
        made = {**row.record["experiment"], "provenance": row.record.get("provenance") or {}}
        yield "scored.tokens", row.measurements.get(scored)
        if made.get("training", {}).get("tokens"):
            yield "trained.tokens", (row.record.get("training_record") or {}).get("tokens")
        else:  # the recipe was not used
            made["training"] = {"init_from": made.get("training", {}).get("init_from")}
        for section, settings in made.items():
            for key, value in settings.items() if isinstance(settings, Mapping) else ():
                if key == "kv_dtype" and isinstance(value, Mapping):
                    both = value.values() if {*value} == {"k", "v"} else (value,)
                    yield from ((f"{section}.{key}", fmt.describe_member(one)) for one in both)
                elif isinstance(value, Mapping):
                    yield from ((f"{section}.{inner}", one) for inner, one in value.items())
                elif isinstance(value, list):
                    yield f"{section}.{key}", ", ".join(map(str, value))
                else:
                    yield f"{section}.{key}", value


def _record_fields(study: Study) -> dict[str, str]:
    """Return ``section.key`` -> its values in LaTeX: the least and greatest number, or words."""
    values: dict[str, dict[Any, None]] = {}
    for name, value in _settings(study):
        if isinstance(value, int | float | str) and value not in ("", "model", "none"):
            values.setdefault(name, {})[value] = None
    return {
        name: span(kept) or join(tex.escape_latex(str(value)) for value in kept)
        for name, kept in values.items()
    }


def _find_features(study: Study) -> Iterator[str]:
    """Yield the features of `terms.tex` that the record shows."""
    for name, value in _settings(study):
        is_set = value not in (None, False, "", "none", "model", 0)
        if is_set or name == "model.position":
            yield from (name, f"{name}={re.split('[:-]', str(value))[0]}")
        if isinstance(value, int) and value > 1:
            yield f"{name}>1"
        if name == "model.attention_pattern" and "L" in str(value):
            yield "local"
        if name == "serving.kv_dtype" and value not in (None, "model"):
            is_block = isinstance(dtype := DTYPES.get(value), BlockDType)
            yield "cache=blocks" if is_block else f"cache={dtype and dtype.is_quantized}"
    for row in study.done_rows:
        model = row.record["experiment"].get("model", {})
        kv, n_kv, n_head = model.get("kv"), model.get("n_kv_head"), model.get("n_head")
        if kv in (None, *NAMED_FORMS) and n_kv and n_head:
            yield f"heads={'mha' if n_kv == n_head else 'mqa' if n_kv == 1 else 'gqa'}"
    yield from (f"metric={name.partition('_')[0]}" for name in study.measured_metrics)
    yield from (f"design={name}" for name in _designs(study))


def _designs(study: Study) -> list[str]:
    design = str(study.sweep.get("design", "full"))
    return [name.partition(":")[0] for name in design.split(" + ")]


def _study_fields(study: Study) -> dict[str, str]:
    """Return the fields that are no setting of an experiment."""
    metric, tests, margin = study.primary_metric, study.tests, study.decide.margin
    is_design, is_scored = study.search is None, not study.is_untrained
    is_trained = is_scored and not study.is_given
    is_tested = is_design and is_scored and len(study.seeds) > 1
    effects = [one for one in study.effects(metric) if one.is_tested] if is_tested else []
    n_trials, n_trainings = len(study.done_rows), len({row.training for row in study.done_rows})
    n_missing, unit = len(study.rows) - n_trials, fmt.display_unit(metric)
    quality = METRICS[metric].title + (f", in {unit}" if unit else "")
    factors = {name: levels for name, levels in study.factors.items() if len(levels) > 1}
    numbers = {
        "cells": str(len(study.cells)), "seeds": study.seeds_of_a_cell,
        "trials": format_count(n_trials, "trial"), "planned": str(len(study.rows)),
        "trainings": format_count(n_trainings, "training"), "unmeasured": str(n_missing),
        "percent": f"{100 * (1 - study.decide.alpha):g}%",
        "margin": METRICS[metric].write_margin(margin),
        "tuning_seeds": join(map(str, (study.sweep.get("tuning") or {}).get("seeds", ()))),
        "looks": join(map(str, tests.sizes if tests is not None else ())), "quality": quality,
        "factors": join(f"{name} ({', '.join(levels)})" for name, levels in factors.items()),
        "design_titles": join(DESIGNS[name].title for name in _designs(study)),
    }  # fmt: skip
    experiments = (row.record["experiment"] for row in study.done_rows)
    numbers["own_files"] = join(
        dict.fromkeys(n for e in experiments for n in e.get("extensions", ()))
    )
    flags = {
        "if_trained": is_trained,
        "if_untrained": not is_scored,
        "if_scored": is_scored,
        "if_given": study.is_given,
        "if_parts": study.scores_parts,
        "if_design": is_design,
        "if_shared": is_design and is_trained and n_trainings < n_trials,
        "if_missing": is_design and n_missing,
        "if_gap": any(abs(gap.value) >= GAP_ROUNDING for gap in study.serving_gaps.values()),
        "if_one_seed": is_design and is_scored and len(study.seeds) < 2,
        "if_tested": is_tested,
        "if_margin": effects and margin is not None,
        "if_looks": effects and tests is not None,
        "if_holm": effects and tests is None,
        "if_pooled": tests is None and any(one.error for one in effects),
    }
    fields: dict[str, str] = {name: tex.escape_latex(text) for name, text in numbers.items()}
    fields |= {name: "" for name, holds in flags.items() if holds}
    return fields | {"parameters": span(map(study.parameters, study.cells))}


def _search_fields(study: Study) -> dict[str, str]:
    if (search := study.search) is None:
        return {}
    names, config, pruning = short_keys(search.keys), search.config, search.config.get("pruning")
    space = []
    for key, values in config["choices"].items():
        options = join(tex.escape_latex(format_setting(one)) for one in values)
        space.append(f"{tex.escape_latex(names[key])} of {options}")
    for key, ends in config["ranges"].items():
        space.append(f"{tex.escape_latex(names[key])} from {span([ends['low'], ends['high']])}")
    title = find_member("search", "tables").objective_title
    goals = (
        f"{'lowest' if one.is_minimized else 'highest'} {title(one.name)}"
        for one in search.objectives
    )
    states = Counter(one.state for one in search.suggestions)
    return {
        "space": "; ".join(space),
        "goals": tex.escape_latex(join(goals)),
        "sampler": tex.escape_latex(split_sampler(config["sampler"])[0]),
        "search_seed": str(config["seed"]),
        "rungs": join(f"{share:.3g}" for share in (pruning or {}).get("rungs", ())),
        "pruning_rule": (pruning or {}).get("rule", ""),
        "suggestions": str(len(search.suggestions)),
        "outcomes": join(f"{count} ended as {state}" for state, count in sorted(states.items())),
        "spent_flops": tex.escape_latex(format_number(search.spent_flops)),
        "spent_time": format_duration(search.spent_seconds),
        "search_seeds": join(map(str, study.seeds)),
    }


def fill_sentence(template: str, fields: Mapping[str, str]) -> str:
    """Fill a template; return nothing if it names a field that has no value."""
    try:
        return tex.fill_latex(template, fields)
    except KeyError:
        return ""


def span(values: Iterable[Any]) -> str:
    """Return numbers as LaTeX: one, or the least and the greatest; empty without any."""
    numbers = (value for value in values if isinstance(value, int | float))
    text = fmt.format_ends(numbers, lambda end: f"{end:,}" if isinstance(end, int) else f"{end:g}")
    return tex.escape_latex(text)


def join(parts: Iterable[str]) -> str:
    """Join words as a list: ``a``, ``a and b``, ``a, b and c``; empty without any."""
    *first, last = list(parts) or [""]
    return f"{', '.join(first)} and {last}" if first else last
