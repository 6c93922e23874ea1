"""A made-up record that every section of a report has something to say about."""

from kvlab.spec import ServingConfig, load_served_model
from tests.support.record_factory import Record

FACTORS = {"heads": ("mha", "mqa"), "sharing": ("none", "trained", "tied")}
SEEDS = (0, 1, 2, 3, 4)
ITEMS = 30
FAILED = ({"heads": "mqa", "sharing": "trained"}, 1)
PRUNED = ({"heads": "mqa", "sharing": "trained"}, 3)


def status(levels, seed):
    failed, pruned = (levels, seed) == FAILED, (levels, seed) == PRUNED
    return "failed" if failed else "pruned" if pruned else "done"


def line(part, metric, value, **more):
    return {
        "part": part, "metric": metric, "variant": "made", "value": value, "device": "made",
        "dtype": "float32", **more,
    }  # fmt: skip


def lines(seconds):
    for prompt in (64, 128):
        place = {"batch_size": 1, "prompt_tokens": prompt}
        yield line("latency", "ttft", 2 * prompt * seconds, **place, cached=True)
        for cached in (True, False):
            value = seconds * (1 if cached else prompt)
            kernel = "flash_attention" if cached else "cpu_tiled; flash_attention"
            yield line("latency", "tpot", value, **place, context_length=prompt, cached=cached,
                       attention=kernel)  # fmt: skip
    yield line("throughput", "tokens_per_second", 1 / seconds, batch_size=1, cached=True)
    yield line("throughput", "tokens_per_second", 3 / seconds, batch_size=4, cached=True)
    yield line("roofline", "bandwidth", 1e9, note="measured on made, float32")
    slow = "measured on made, float32; 60% of the bandwidth: products are slow"
    yield line("roofline", "product_bandwidth", 6e8, note=slow)
    yield line("roofline", "matrix_rate", 1e11)
    place = {"batch_size": 1, "context_length": 64, "cached": True}
    for metric, value in {
        "step_flops": 10**7, "step_weight_bytes": 10**6, "step_kv_read_bytes": 10**5,
        "step_measured": seconds, "efficiency": 5e-4 / seconds, "mbu": 0.4, "mfu": 0.1,
    }.items():  # fmt: skip
        yield line("roofline", metric, value, **place)
    yield line("roofline", "step_predicted", 5e-4, **place, verdict="memory")


class FullRecord(Record):
    """Curves, roofline, loss by position, starting weights, a cache of another dtype, failures."""

    def __init__(self, **changes):
        made = {"factors": FACTORS, "seeds": SEEDS, "items": ITEMS, "status": status}
        super().__init__(**{**made, **changes})

    def description(self, cells):
        found = {**super().description(cells), "reported_seeds": [[0, 1, 2]]}
        found["patches"]["sharing"]["tied"] = {"serving.tie": "adjacent:2"}
        return found

    def details(self, levels, seed):
        return {**super().details(levels, seed), "texts": self.texts(levels, seed)}

    def texts(self, levels, seed):
        """Eight documents of 100 tokens; their losses differ, and each seed's own a little."""
        measured = self.measurements(levels, seed)
        parts = {"loss": measured["loss"], "served": measured["loss_served"]}
        return {
            way: {
                "documents": list(range(8)),
                "tokens": [100] * 8,
                "nats": [100 * (loss + (n - 3.5) / 10 + 1e-3 * (n * seed % 3)) for n in range(8)],
                **({"one_shot_nats": [100 * parts["loss"]] * 8} if way == "served" else {}),
            }
            for way, loss in parts.items()
        }

    def seconds(self, levels, seed):
        return (1e-3 if levels["heads"] == "mha" else 5e-4) * (1 + 0.1 * seed)

    def measurements(self, levels, seed):
        found = super().measurements(levels, seed)
        loss = found["loss"]
        if levels["sharing"] == "tied":  # gaps of a tie differ between trainings
            more = (0.03 if levels["heads"] == "mqa" else 0.01) * seed
            for name, by in (("loss_served", 1), ("serving_gap", 1), ("bits_per_byte_served", 3)):
                found[name] += more / by
        for ending, less in (("", 0.0), ("_served", 0.125)):
            found |= {f"loss_part{i}{ending}": loss - i / 10 + less for i in range(1, 9)}
            found |= {f"loss_beyond{ending}": loss + less}
        found |= {"hellaswag_lmeval_acc_norm": 0.3, "hellaswag_lmeval_acc_norm_served": 0.4}
        found |= {"peak_bytes_activations": 10**6 + seed, "tpot_ms_p99": 2.0 + seed}
        found |= {"tpot_ms_uncached_p50": 3.0 + seed, "training_tokens_per_second": 1000.0 + seed}
        found |= {"training_peak_bytes": (20 + seed) * 2**20}
        found |= {"kv_dtype_loss_change": 1e-3 + 1e-4 * seed, "kv_dtype_logit_rms": 0.01}
        found |= {"kv_dtype_logit_largest": 0.1}
        found |= {"loss_tokens": 16_384, "served_tokens": 16_384}
        kl = 1e-12 if levels["sharing"] == "none" else 1e-6 * 2**seed
        for name, value in (("kl", kl), ("top_changed", 0.01 + 0.001 * seed)):
            found |= {f"serving_{name}": value, f"serving_{name}_stderr": value / 10}
            found |= {f"serving_{name}_part{i}": value / i for i in range(1, 9)}
        return found

    def result(self, levels, seed, status):
        result = super().result(levels, seed, status)
        is_mqa = levels["heads"] == "mqa"
        shape = load_served_model("gpt2", {"model.n_kv_head": 1} if is_mqa else {})
        result["experiment"] |= {
            "model": shape.model.model_dump(mode="json"),
            "serving": ServingConfig().model_dump(mode="json"),
            "training": {"tokens": 614_400, "batch_tokens": 4096, "evaluate_tokens": 8192}
            | ({"kv_dtype": "int4", "kv_group": 16} if is_mqa else {}),
        }
        result["provenance"]["timings"] = "shared" if seed == 0 else "exclusive"
        if status == "done":
            result["benchmark"] = [*lines(self.seconds(levels, seed))]
            names = {"copied": ["a", "b"], "pooled": ["c"], "averaged": [], "unused": ["d"]}
            result["training_record"]["start"] = {
                "source": "made", **names, "fresh": {"e": "another shape"},
            }  # fmt: skip
        if status == "pruned":
            result["pruned"] = {"step": 30, "steps": 150, "loss": 5.5}
            result["error"] = None
        return result


RECORD = FullRecord()
