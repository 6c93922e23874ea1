"""Time per token as the roofline predicts it beside the measured, on layers of GPT-2 XL's size.

The bandwidth of such a layer's one-row products is probed in turn with the decode steps, so that a
machine that slows down slows both: the ratio is that of the model, not of the moment.
"""

from collections.abc import Iterator

import torch

from kvlab.benchmark.interleave import interleave
from kvlab.benchmark.rule import StopRule
from kvlab.benchmark.samples import compare
from kvlab.benchmark.session import Variant
from kvlab.benchmark.timing import Clock
from kvlab.layout.roofline import step_cost
from kvlab.model import GPT
from kvlab.model.linear import linear
from kvlab.spec import ModelConfig, ServingConfig

LAYERS, STEPS = 6, 8


def run() -> Iterator[str]:
    """One row a context: the predicted over the measured time of a step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig(preset="gpt2-xl", n_layer=LAYERS)
    variant = Variant("xl", GPT(config, device=device).eval(), ServingConfig())
    weights = [torch.rand(6400, 1600, device=device) for _ in range(6)]
    row, size = torch.rand(1, 1, 1600, device=device), sum(weight.nbytes for weight in weights)

    @torch.inference_mode()
    def probe() -> dict[str, list[float]]:
        clock = Clock(device)
        clock.mark()
        for _ in range(STEPS):
            for weight in weights:
                linear(row, weight, None)
            clock.mark()
        return {"steps": clock.intervals()}

    yield f"{LAYERS} layers of GPT-2 XL, float32, {torch.get_num_threads()} threads, batch 1"
    yield "context  measured ms  bandwidth GB/s  predicted/measured  99% interval"
    for prompt in (64, 480, 1000):
        cache = variant.decoder.new_cache(1, prompt + STEPS)

        def turn(cache=cache) -> dict[str, list[float]]:  # type: ignore[no-untyped-def]
            return {"steps": variant.decoder.decode(cache, STEPS).steps}

        timed = interleave({"probe": probe, "xl": turn}, StopRule(least=12, most=12))
        cost = step_cost(config, variant.serving, 1, prompt + STEPS // 2, "float32")
        found = compare(timed.samples["probe", "steps"], timed.samples["xl", "steps"])
        assert found is not None
        scale = cost.bytes / size  # a probe reads the weights, a step moves this much more
        rate = size / timed.samples["probe", "steps"].median / 1e9
        yield (
            f"{prompt + STEPS // 2:7}  {timed.samples['xl', 'steps'].median * 1e3:11.1f}"
            f"  {rate:14.1f}  {found.ratio * scale:18.2f}"
            f"  {found.low * scale:.2f} to {found.high * scale:.2f}  {timed.noise.note}"
        )
