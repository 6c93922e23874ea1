"""What the report's section of the serving gap says of eviction."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.extensions.eviction.config import EvictConfig
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.report.sections.serving import list_sections


def report_eviction(study: Study) -> list[doc.Content]:
    """Report what eviction dropped, if cells evict."""
    evicting = list(study.means("evicted_share"))
    if not evicting:
        return []

    def entries(levels: Levels) -> doc.Entries:
        kept = set()
        for serving in list_sections(study, levels, "serving"):
            evict = serving.get("evict") or {}
            size = f"{evict['keep']:,} tokens" if evict.get("keep") else f"{evict['bytes']:,} bytes"
            if evict.get("keep") and evict["by"] != "recency":  # what is not set has defaults
                rule = EvictConfig.model_construct(**evict).resolve(evict["keep"])
                evict = {**evict, "sinks": rule.sinks, "recent": rule.recent, "pool": rule.pool}
            names = ("prompt", "sinks", "recent", "pool", "top_share")
            given = (f"{name} {evict[name]}" for name in names if evict.get(name) is not None)
            by = fmt.describe_member(evict["by"])
            kept.add(", ".join([f"{size} by {by.replace('_', ' ')}", *given]))
        yield "keeps", ", ".join(sorted(kept))
        share = 100 * (study.mean(levels, "evicted_share") or 0.0)
        yield "dropped (%)", doc.cell(f"{share:.1f}", share)

    caption = "Cells by the tokens that their cache keeps; mean over seeds."
    table = cols.cells_table(study, "eviction", caption, entries, evicting)
    rules = [one.get("evict") or {} for c in evicting for one in list_sections(study, c, "serving")]
    has_prompt = any(rule.get("prompt") for rule in rules)
    return [doc.Heading("Eviction"), texts.write("eviction", has_prompt=has_prompt), table]
