"""Decoded tokens each second against the batch."""

from collections.abc import Iterator

from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.session import Session, compare_variants


def measure(session: Session) -> Iterator[Measurement]:
    """All tokens of a run over the time of its steps, the prompt's left out: the median run."""
    prompt, new = session.settings.prompt_tokens, session.settings.new_tokens
    for batch, timed in session.throughputs.items():
        place = {
            "batch_size": batch,
            "prompt_tokens": prompt,
            "new_tokens": new,
            "context_length": prompt + new,
            "cached": True,
        }
        for variant in session.variants:
            runs = timed.samples[variant.name, "steps"].totals
            middle = runs.quantile(0.5)
            yield session.line(
                "throughput",
                "tokens_per_second",
                variant,
                batch * new / middle.value,
                "tokens/s",
                low=batch * new / middle.high,
                high=batch * new / middle.low,
                **place,
                **session.trust(timed, runs),
            )
        yield from compare_variants(session, "throughput", "tpot_ratio", "steps", timed, **place)
