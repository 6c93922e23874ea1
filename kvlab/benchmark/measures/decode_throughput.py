"""Decoded tokens per second by batch size."""

from collections.abc import Iterator

from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.session import Session

TABLES = (
    TableLayout("throughput", ("prompt_tokens", "batch_size"), {
        "tokens_per_second": "tokens/s", "tpot_ratio": "a token, of the first",
        "step_preparation": "to prepare a step",
    }),
)  # fmt: skip


def measure(session: Session) -> Iterator[Measurement]:
    """Yield the rate of the median run: its tokens over the time of its decode steps."""
    for batch, timings in session.throughputs.items():
        fields = session.settings.run_fields(batch)
        count = batch * session.settings.new_tokens
        for variant in session.variants:
            runs = timings.samples[variant.name, "steps"].totals
            median = runs.quantile(0.5)
            yield session.make_line(
                "throughput",
                "tokens_per_second",
                variant,
                count / median.value,
                "tokens/s",
                low=count / median.high,
                high=count / median.low,
                **fields,
                **session.slots.get((variant.name, batch, session.settings.prompt_tokens), {}),
                **session.reliability(timings, runs, variant),
            )
        prompt = session.settings.prompt_tokens
        yield from session.preparation_lines("throughput", batch, prompt, **fields)
        yield from session.compare_variants("throughput", "tpot_ratio", "steps", timings, **fields)
