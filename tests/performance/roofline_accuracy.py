"""Time per token as the roofline predicts it beside the measured, on layers of GPT-2 XL's size.

Two predictions. The first is the one that `kvlab bench` prints as ``step_predicted``: from the
ceilings of the device, measured just before. The second has the one-row products of such a layer probed in turn with the
steps, so that a machine that slows down slows both: the ratio is that of the model, not of the
moment. On a machine that is busy now the first is expected to promise too much.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvlab.benchmark.decode_timing import DecodeRun, DeviceClock
from kvlab.benchmark.device_peaks import GPT2_XL_LAYER
from kvlab.benchmark.measurement import StopRule
from kvlab.benchmark.session import BenchmarkSettings, Session, Variant
from kvlab.benchmark.timing_statistics import compare_timings
from kvlab.layout.roofline_model import StepCost, decode_step_cost
from kvlab.model import GPT
from kvlab.model.kernels.linear import linear
from kvlab.spec import ModelConfig, ServingConfig
from tests.performance.timing import LimitMissed

LAYERS, STEPS, PROMPTS, ROUNDS = 6, 8, (64, 480, 1000), 8
WITHIN = 0.25


def run() -> Iterator[str]:
    """One row a context: the predicted over the measured time of a step, in both ways.

    Raises:
        LimitMissed: ``step_predicted`` or the probe is further than `WITHIN` from the measured.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(preset="gpt2-xl", n_layer=LAYERS)
    variant = Variant("xl", GPT(config, device=device).eval(), ServingConfig())
    rule = StopRule(min_rounds=ROUNDS, max_rounds=ROUNDS)
    settings = BenchmarkSettings(PROMPTS[0], STEPS, PROMPTS, (1,), rule)
    session = Session([variant], settings, remeasure_peaks=True)
    disturbance = session.peaks("float32").disturbance
    if disturbance:
        yield f"while the ceilings were measured, {disturbance}"
    found = [_probed(session, length) for length in PROMPTS]
    yield f"{LAYERS} layers of GPT-2 XL, float32, {torch.get_num_threads()} threads, batch 1"
    yield "context  measured ms  step_predicted/measured  probe in turn/measured  99% interval"
    outside: dict[str, list[str]] = {"step_predicted": [], "the probe in turn": []}
    for row in found:
        yield (
            f"{row.context:7}  {row.seconds * 1e3:11.1f}  {row.efficiency(session):23.2f}"
            f"  {row.probed:22.2f}  {row.low:.2f} to {row.high:.2f}  {row.note}"
        )
        for name, value in zip(outside, (row.efficiency(session), row.probed), strict=True):
            if abs(value - 1) > WITHIN:
                outside[name].append(f"{value:.2f} of the measured at {row.context}")
    for name, missed in outside.items():
        yield f"{name}: {len(found) - len(missed)} of {len(found)} within {WITHIN:.0%}"
    texts = [f"{name} is {', '.join(missed)}" for name, missed in outside.items() if missed]
    if texts:
        raise LimitMissed(f"{'; '.join(texts)}; within {WITHIN:.0%} is wanted")


@dataclass(frozen=True)
class Row:
    """``probed``, ``low`` and ``high``: predicted from products in turn with the steps, as a
    share of the measured."""

    context: int
    cost: StepCost
    seconds: float
    probed: float
    low: float
    high: float
    note: str

    def efficiency(self, session: Session) -> float:
        """The predicted time as `kvlab bench` has it, as a share of the measured."""
        return self.cost.seconds(session.peaks("float32")) / self.seconds


def _probed(session: Session, length: int) -> Row:
    (variant,), device = session.variants, session.device
    weights = [torch.rand(shape, device=device) for shape in GPT2_XL_LAYER * 2]
    rows = {inputs: torch.rand(1, 1, inputs, device=device) for _, inputs in GPT2_XL_LAYER}
    size = sum(weight.nbytes for weight in weights)
    cache = variant.model.new_cache(1, length + STEPS, variant.serving)

    @torch.inference_mode()
    def probe() -> dict[str, list[float]]:
        clock = DeviceClock(device)
        clock.mark()
        for _ in range(STEPS):
            for weight in weights:
                linear(rows[weight.shape[1]], weight, None)
            clock.mark()
        return {"steps": clock.intervals()}

    def steps() -> dict[str, list[float]]:
        return {"steps": DecodeRun(variant.model, cache, STEPS).time()["steps"]}

    timed = session.time_interleaved({"xl": steps, "probe": probe})
    found = compare_timings(timed.samples["probe", "steps"], timed.samples["xl", "steps"])
    assert found is not None, "the rounds are enough"
    context = length + (STEPS + 1) // 2
    cost = decode_step_cost(variant.model.config, variant.serving, 1, context, "float32")
    scale = cost.bytes / size  # the probe reads ``size`` bytes, a step moves this much more
    seconds = timed.samples["xl", "steps"].median
    three = (found.ratio * scale, found.low * scale, found.high * scale)
    return Row(context, cost, seconds, *three, timed.noise.note)
