"""The report's section of a mix: the loss of each source, one-shot and served."""

import re

from kvlab.analysis.study import Study
from kvlab.report import document as doc
from kvlab.report.sections.tasks import hint_counts, scored_table

_TOKENS = re.compile(r"loss_([a-z0-9_]+?)(_served)?_tokens")


def report_mix(study: Study) -> doc.Section | None:
    """Report the losses of the sources that the trials were trained on together."""
    found = [match for name in study.measured_metrics if (match := _TOKENS.fullmatch(name))]
    if not found:
        return None
    heads = {}
    for source in sorted({match[1] for match in found}):
        counts = [f"loss_{source}{ending}_tokens" for ending in ("", "_served")]
        hint = hint_counts(study, counts, "targets")
        heads[f"loss_{source}"] = (source.replace("_", "-"), hint)
    note = (
        "Each model was trained on these sources together. The validation loss is the mean over the"
        " targets of all of them; here it is divided."
    )
    table = scored_table(study, "mix", "Loss of each source (nats/token)", heads)
    return doc.Section("Sources of the mix", (doc.Paragraph((note,)), table))
