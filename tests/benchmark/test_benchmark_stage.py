import time
from types import SimpleNamespace

import pytest
import torch

from kvlab.benchmark import decode_timing, session
from kvlab.benchmark.benchmark_stage import benchmark
from kvlab.benchmark.decode_timing import DecodeRun
from kvlab.benchmark.interleaving import run_interleaved
from kvlab.benchmark.measurement import Measurement, StopRule
from kvlab.benchmark.measures import generation_task
from kvlab.benchmark.timing_statistics import compare_timings
from kvlab.errors import Stopped
from kvlab.model import GPT
from kvlab.model.generate import EagerDecoder
from kvlab.spec import Experiment, ModelConfig
from kvlab.store.metrics import METRICS
from kvlab.trial.joint_timing import JointTiming, run_joint_timing
from kvlab.trial.run import StopCheck

MODEL = {"vocab_size": 257, "block_size": 512, "n_layer": 4, "n_head": 4, "n_embd": 128}


def experiment(**settings):
    return Experiment(
        name="small",
        model=MODEL,
        data={"tokenizer": "bytes"},
        benchmark={"prompt_tokens": 480, "new_tokens": 32, "repeats": 2, **settings},
    )


def test_all_of_it_under_the_known_names(monkeypatch):
    monkeypatch.setattr(generation_task, "NEW_TOKENS", 16)
    of = experiment(batch_sizes=[1, 4], context_lengths=[4, 460], parts=["task"])
    updates, text = [], [n % 257 for n in range(1000)]
    whole = benchmark(GPT(of.model), of, on_progress=updates.append, tokens=text)
    measurements = whole.measurements
    assert set(measurements) < set(METRICS)
    assert len(measurements) == 12
    assert all(value > 0 for value in measurements.values())
    assert {update["stage"] for update in updates} == {"benchmark"}
    peaks = {(one.metric, one.cached): one.value for one in whole.lines if "peak" in one.metric}
    assert measurements["peak_bytes_cached"] == peaks["peak", True]
    assert measurements["peak_bytes_uncached"] == peaks["peak", False]
    assert measurements["peak_bytes_activations"] == peaks["peak_activations", True]
    # orders of magnitude that hold on any machine: 512 tokens again, or one
    assert measurements["tpot_ms_uncached_p50"] > 3 * measurements["tpot_ms_p50"]
    assert measurements["tpot_ms_p50"] <= measurements["tpot_ms_p95"]
    assert measurements["tpot_ms_p95"] <= measurements["tpot_ms_p99"]
    for line in whole.lines:
        parsed = Measurement.model_validate_json(line.model_dump_json())
        assert parsed == line
    assert {line.batch_size for line in whole.lines if line.part == "throughput"} == {1, 4}
    assert [line.prompt_tokens for line in whole.lines if line.metric == "ttft"] == [4, 460, 480]
    rates = [line for line in whole.lines if line.metric == "tasks_per_second"]
    assert [(line.cached, line.batch_size) for line in rates] == [(False, 1), (True, 1), (True, 4)]
    timed = [line for line in whole.lines if line.rounds]
    assert {line.metric for line in timed} >= {"ttft", "tpot", "tokens_per_second"}
    assert {line.attention for line in timed} == {"flash_attention"}


def stopwatch(model, text):
    """Seconds to the first token and for each further one, with nothing of kvlab's measuring."""
    cache, seconds = model.new_cache(1, 512), []
    with torch.inference_mode():
        began = time.perf_counter()
        last = torch.tensor([text.shape[1] - 1])
        token = model.compute_logits(
            model.hidden_states(text, cache=cache, token_indices=last)
        ).argmax(-1)[None]
        first = time.perf_counter() - began
        for _ in range(32):
            began = time.perf_counter()
            token = model(token, cache=cache).argmax(-1)
            seconds.append(time.perf_counter() - began)
    return {"first": [first], "steps": seconds}


@pytest.mark.faults  # it times, so it runs where nothing else does
def test_an_independent_stopwatch_agrees():
    """In turns, so that a busy machine is so for both: within a tenth, or within the noise."""
    model, text = GPT(experiment().model).eval(), torch.randint(0, 257, (1, 480))
    cache = model.new_cache(1, 512)
    works = {
        "stopwatch": lambda: stopwatch(model, text),
        "kvlab": lambda: DecodeRun(model, cache, 32).time(),
    }
    timed = run_interleaved(works, StopRule(min_rounds=8, max_rounds=60, seconds=8))
    for series in ("first", "steps"):
        comparison = compare_timings(
            timed.samples["kvlab", series], timed.samples["stopwatch", series]
        )
        is_equal = comparison.low <= 1.0 <= comparison.high
        assert is_equal or 0.9 < comparison.ratio < 1.1, (series, comparison)


def test_decoding_fills_the_cache_to_its_last_token():
    model = GPT(experiment().model)
    cache = model.new_cache(2, 8)
    run = DecodeRun(model, cache, 3)
    for _ in range(2):
        assert len(run.time()["steps"]) == 3
        assert cache.length == cache.max_length == 8


def test_on_cuda_a_pass_that_is_not_timed_precedes_every_timed_one(monkeypatch):
    """The clock of what is timed, and the passes: a step is prepared once, and each run has a
    prefill before its clock starts."""
    log = []

    class Clock:
        def __init__(self, _device):
            self.marks = 0

        def mark(self):
            log.append("mark")
            self.marks += 1

        def intervals(self):
            return [1.0] * (self.marks - 1)

    class OnCuda(GPT):
        device = SimpleNamespace(type="cuda")

        def hidden_states(self, tokens, *others, **named):
            log.append(tokens.shape[1])
            return super().hidden_states(tokens, *others, **named)

    model = GPT(experiment().model)
    run = DecodeRun(model, model.new_cache(1, 8), 2)
    model.__class__ = OnCuda
    monkeypatch.setattr(decode_timing, "DeviceClock", Clock)
    monkeypatch.setattr(
        decode_timing, "make_decoder", lambda *a: log.append("prepare") or EagerDecoder(*a)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    prepared, timed = ["prepare"], [6, "mark", 6, "mark", 1, "mark", 1, "mark"]
    assert run.time()["steps"] == [1.0, 1.0]
    assert log == [*prepared, *timed]
    assert run.preparation > 0
    run.time()
    assert log == [*prepared, *timed, *timed]


def test_rounds_go_on_until_the_error_is_met_or_five_times_as_many():
    for seconds in (86400, 1e-9):
        of = experiment(prompt_tokens=8, new_tokens=4, repeats=1, seconds=seconds)
        lines = [line for line in benchmark(GPT(of.model), of).lines if line.part == "latency"]
        (rounds,) = {line.rounds for line in lines}
        if seconds < 1:
            assert rounds == 1, "no further round begins after the time for it"
            assert all(line.noisy for line in lines), "the error is not known"
        else:
            assert 2 <= rounds <= 5, "one round does not tell its error"
            assert rounds == 5 or all(line.relative_error <= 0.05 for line in lines)


def test_what_the_listener_raises_ends_it():
    def stop(update):
        raise Stopped(update["note"])

    of = experiment()
    with pytest.raises(Stopped, match="peak"):
        benchmark(GPT(of.model), of, on_progress=stop)


def test_trials_that_are_timed_together_take_turns(monkeypatch):
    """Every round runs each variant once, forwards and backwards; memory is not taken again."""
    monkeypatch.setattr("kvlab.benchmark.interleaving.MAX_FOREIGN_SHARE", 2.0)
    turns = []
    decode = session.time_uncached  # one step of every turn

    def count(model, length):
        turns.append(model.config.n_kv_head)
        return decode(model, length)

    monkeypatch.setattr(session, "time_uncached", count)
    trials = {}
    for heads in (4, 1):
        model = {**MODEL, "n_layer": 1, "n_kv_head": heads}
        settings = {"prompt_tokens": 8, "new_tokens": 4, "repeats": 2, "seconds": 1e-6}
        trials[f"trial{heads}"] = experiment(**settings).model_copy(
            update={"model": ModelConfig.model_validate(model), "name": f"heads{heads}"}
        )
    answer = run_joint_timing(JointTiming(0, trials), lambda: None)
    assert turns == [4, 1, 4, 1, 1, 4]  # after one warm-up of each
    assert answer["disturbance"] == ""
    for trial, one in trials.items():
        found = answer["trials"][trial]
        assert found["measurements"].keys() == {
            "ttft_ms", "tpot_ms_p50", "tpot_ms_p95", "tpot_ms_p99", "tpot_ms_uncached_p50",
            "tokens_per_second",
        }  # fmt: skip
        assert {line["variant"] for line in found["benchmark"]} == {one.name}
        metrics = {line["metric"] for line in found["benchmark"]}
        assert metrics == {"ttft", "tpot", "tokens_per_second"}


def test_a_session_that_is_asked_to_stop_has_no_times(tmp_path):
    (tmp_path / "stop").touch()
    task = JointTiming(0, {"t": experiment()})
    stop = StopCheck([tmp_path / "stop"], ())
    assert run_joint_timing(task, stop.check) == {"error": "asked to stop"}
