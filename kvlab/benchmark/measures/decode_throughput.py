"""Decoded tokens per second by batch size."""

from collections.abc import Iterator, Sequence

from kvlab.benchmark.measurement import Measurement, Metrics, TableLayout, find_value
from kvlab.benchmark.session import Session
from kvlab.spec.benchmark_config import BenchmarkConfig

TABLES = (
    TableLayout("throughput", {"prompt_tokens": "prompt", "batch_size": "batch"}, {
        "tokens_per_second": "tokens/s", "tpot_ratio": "a token, of the first",
        "step_preparation": "to prepare a step",
    }),
)  # fmt: skip


def measure(session: Session) -> Iterator[Measurement]:
    """Yield the rate of the median run: its tokens over the time of its decode steps."""
    for batch, timings in session.throughputs.items():
        run = session.settings.run_fields(batch)
        count = batch * session.settings.new_tokens
        for variant in session.variants:
            runs = timings.samples[variant.name, "steps"].totals
            median = runs.quantile(0.5)
            yield session.make_line(
                "throughput", "tokens_per_second", variant, count / median.value, "tokens/s",
                low=count / median.high, high=count / median.low, **run,
                **timings.slots[variant.name], **session.reliability(timings, runs, variant),
            )  # fmt: skip
        yield from session.preparation_lines("throughput", timings, **run)
        yield from session.compare_variants("throughput", "tpot_ratio", "steps", timings, **run)


def metrics(lines: Sequence[Measurement], config: BenchmarkConfig) -> Metrics:
    """Return what a trial records of its lines."""
    largest = max(config.batch_sizes)
    return {"tokens_per_second": find_value(lines, "tokens_per_second", batch_size=largest)}
