"""Whether trials were timed alone: a time taken beside other work says less about its cell."""

from kvlab.report.study import Study


def timed_beside_others(study: Study) -> str:
    """How many trials were timed while something else ran, as a clause; empty for none.

    Older results do not say, and count as none.
    """
    said = [row.facts["provenance"].get("timings") for row in study.done]
    count = said.count("shared")
    if not count:
        return ""
    which = "All" if count == len(said) else f"{count} of {len(said)}"
    return (
        f"{which} trials were timed while something else used their device or its machine's cores"
    )
