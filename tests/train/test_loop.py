import math
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from torch._dynamo.utils import calculate_time_spent, counters

from kvlab.data.batches import get_training_batch
from kvlab.errors import DataError, Diverged, RecordDamaged, Stopped, StoreError
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.model.kernels.cpu_kernel import use_plain_code
from kvlab.spec import TrainingConfig
from kvlab.train import loop, train_step
from kvlab.train.loop import train
from kvlab.train.tensor_files import load_final_weights
from kvlab.train.train_step import SummedLoss, TrainStepper, learning_rate
from kvlab.train.training_record import load_training_record, mean_curve
from tests.support.tiny_training import assert_same_losses, dataset, experiment, model

DATA = dataset()


def run(of, directory, seed=0, **options):
    trained = model(of, seed)
    record = train(trained, DATA, of, seed=seed, directory=directory, **options)
    return trained, record


def plain_training(of, seed=0, dtype=torch.float32):
    """The same training as anybody would write it down, over all tokens of a step at once."""
    net, t, block = model(of, seed).to(dtype), of.training, of.model.block_size
    wide = [p for p in net.parameters() if p.dim() > 1]
    thin = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": thin, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    curve = []
    for step in range(t.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(t, step)
        x, y = get_training_batch(
            DATA.train, seed=seed, step=step, batch_size=t.batch_tokens // block, block_size=block
        )
        logits = net(torch.from_numpy(x))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(y).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return net, curve


@pytest.mark.usefixtures("code_path")
def test_it_is_plain_training_whatever_the_microbatch(tmp_path):
    of = experiment()
    expected, curve = plain_training(of)
    flops = 3 * (2 * 16 * (258 * 16 + 2 * 12 * 16 * 16) + 2 * 4 * 16**3) / 16  # by hand, a token
    for tokens in (None, 16, 32):
        small = experiment(resources={"microbatch_tokens": tokens})
        trained, record = run(small, tmp_path / str(tokens))
        assert [point[2] for point in record.train_curve] == pytest.approx(curve, abs=1e-5)
        for a, b in zip(trained.parameters(), expected.parameters(), strict=True):
            assert (a - b).abs().max() < 1e-4
        assert record.flops_per_second == pytest.approx(flops * record.tokens_per_second)
        assert record.mfu == pytest.approx(record.flops_per_second / record.peak_flops_per_second)
        assert (record.workers, record.peak_flops_origin) == (1, "measured")
        assert 1e8 < record.peak_flops_per_second < 1e13


def test_it_learns_and_records_what_it_did(tmp_path):
    of = experiment(training={"tokens": 64 * 80, "evaluate_every": 30, "evaluate_tokens": 320})
    updates = []
    trained, record = run(of, tmp_path, on_progress=updates.append)
    assert record == load_training_record(tmp_path)
    assert (record.steps, record.tokens, record.resumed_from) == (80, 5120, [])
    assert [p[:2] for p in record.validation_curve] == [[30, 1920], [60, 3840], [80, 5120]]
    assert [p[0] for p in record.train_curve] == list(range(1, 81))
    assert record.train_curve[0][2] == pytest.approx(math.log(258), abs=0.1)
    assert record.validation_curve[-1][2] < 4.2, "log 258 is 5.55, and 41 tokens make up the text"
    assert record.tokens_per_second > 0
    assert record.seconds > 0
    assert record.peak_bytes > sum(p.nbytes for p in trained.parameters())
    assert (updates[0]["step"], updates[-1]["step"], updates[-1]["steps"]) == (1, 80, 80)
    curves = updates[-1]["curves"]
    assert curves == {"train_loss": record.train_curve, "validation_loss": record.validation_curve}
    assert not (tmp_path / "checkpoints").exists()
    again, same = run(of, tmp_path, on_progress=lambda _: pytest.fail("it trained again"))
    assert same == record
    assert all(map(torch.equal, trained.parameters(), again.parameters()))
    total = (len(DATA.validation) - 1) // 16
    starts = [16 * (index * total // 20) for index in range(20)]
    rows = np.stack([DATA.validation[start : start + 17] for start in starts])
    text = torch.from_numpy(rows.astype("int64"))
    loss = F.cross_entropy(trained(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).item()
    assert record.validation_curve[-1][2] == pytest.approx(loss, abs=1e-5)


def test_progress_reports_the_rate_of_the_last_steps(tmp_path, monkeypatch):
    """Seconds of a step: 1 in a process that is stopped, 10 at the start of the next, then 1. The
    first of each process warms up and takes 50."""
    of = experiment(training={"tokens": 64 * 90})
    seconds = iter([50.0] + [1.0] * 19 + [50.0] + [10.0] * 19 + [1.0] * 50)
    now, is_step = 0.0, True

    def tick():
        nonlocal now, is_step
        now += next(seconds) if not is_step else 0.0
        is_step = not is_step
        return now

    clock = SimpleNamespace(perf_counter=tick, monotonic=lambda: now)
    monkeypatch.setattr(loop, "time", clock)
    first, second = [], []
    with pytest.raises(Stopped):
        run(of, tmp_path, should_stop=lambda: now >= 69, on_progress=first.append)
    _, record = run(of, tmp_path, on_progress=second.append)
    assert first[-1]["tokens_per_second"] == pytest.approx(64)
    rates = {update["step"]: update["tokens_per_second"] for update in second}
    assert rates[21] == pytest.approx(64 / 50), "of the only step so far"
    assert rates[22] == rates[39] == pytest.approx(6.4)
    assert rates[80] == pytest.approx(64, rel=0.01), "what the steps before took has faded"
    assert rates[90] == pytest.approx(64, rel=0.001)
    assert second[-1]["flops_per_second"] == pytest.approx(
        record.flops_per_second * rates[90] / record.tokens_per_second
    )
    left = {update["step"]: update["seconds_left"] for update in second}
    assert left[60] == pytest.approx(30 * (240 + 20) / 40), "at the mean pace of this process"
    assert left[90] == 0
    assert record.seconds == pytest.approx(69 + 240 + 50)
    steps = 90 - 2  # the first of each process warms up
    assert record.tokens_per_second == pytest.approx(64 * steps / (19 + 19 * 10 + 50))


def test_a_long_curve_is_thinned_to_means():
    curve = mean_curve([float(step) for step in range(1003)], 1003, batch_tokens=16)
    assert curve[:2] == [[2, 32, 0.5], [4, 64, 2.5]]
    assert curve[-1] == [1003, 1003 * 16, 1002.0]
    assert len(curve) == 502


def test_no_steps_keep_the_initial_weights_which_fit_no_other_model(tmp_path):
    of = experiment(training={"tokens": 0})
    _, record = run(of, tmp_path, seed=5)
    assert (record.steps, record.tokens, record.tokens_per_second) == (0, 0, 0.0)
    loaded = model(of, seed=1)
    load_final_weights(loaded, tmp_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(loaded.parameters(), model(of, seed=5).parameters(), strict=True)
    )
    for change in ({"n_embd": 32}, {"n_kv_head": 1}, {"n_layer": 3}):
        with pytest.raises(StoreError, match="does not fit the model"):
            load_final_weights(model(experiment(model=change)), tmp_path)


@pytest.mark.parametrize("change", [{"steps": "many"}, {"seconds": None}, {"workers": ...}])
def test_a_record_of_another_form_is_damaged(tmp_path, change):
    _, record = run(experiment(training={"tokens": 0}), tmp_path)
    assert load_training_record(tmp_path) == record
    content = read_sealed_json(tmp_path / "training.json") | change
    content = {key: value for key, value in content.items() if value is not ...}
    write_sealed_json(tmp_path / "training.json", content)
    with pytest.raises(RecordDamaged):
        load_training_record(tmp_path)


@pytest.mark.parametrize(("position", "pattern"), [("learned", "G"), ("rope", "L"), ("none", "L")])
def test_bfloat16_trains_close_to_float32_and_keeps_float32_weights(tmp_path, position, pattern):
    """In a block for which attention has its own kernel."""
    shape = {"block_size": 256, "n_embd": 64, "n_head": 2, "position": position}
    shape |= {"window": 100, "attention_pattern": "GL"} if pattern == "L" else {}
    training = {"tokens": 512, "batch_tokens": 256, "evaluate_tokens": 256}
    _, exact = run(experiment(shape, training), tmp_path / "a")
    trained, reduced = run(experiment(shape, {**training, "precision": "bfloat16"}), tmp_path / "b")
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    assert_close(reduced, exact)


def assert_close(reduced, exact):
    last, expected = reduced.validation_curve[-1][2], exact.validation_curve[-1][2]
    assert last != expected
    assert last == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_residual_stream_in_bfloat16_trains_close_to_float32(tmp_path, norm):
    """It is what every layer returns, in the training and its validation alone."""
    of = experiment({"norm": norm, "position": "rope"}, {"precision": "bfloat16"})
    reduced = of.model_copy(
        update={"training": TrainingConfig(**{**of.training.model_dump(), "residual": "bfloat16"})}
    )
    streams, records = [], []
    for each in (of, reduced):
        trained, dtypes = model(each), set()
        for block in trained.blocks:
            block.register_forward_hook(lambda _m, _x, out, seen=dtypes: seen.add(out.dtype))
        records.append(train(trained, DATA, each, seed=0, directory=tmp_path / str(len(streams))))
        streams.append(set(dtypes))
        trained(torch.zeros(1, 3, dtype=torch.int64))
        assert dtypes == streams[-1] | {torch.float32}
    assert streams == [{torch.float32}, {torch.bfloat16}]
    assert_close(*records)


@pytest.mark.faults
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_training_is_the_same_training_and_what_was_compiled_is_found_again(
    tmp_path, monkeypatch, precision
):
    """In the folder, by the next attempt; the seconds of all attempts add up."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    training = {"tokens": 64 * 8, "evaluate_tokens": 80, "precision": precision}
    _, eager = run(experiment({"n_layer": 1}, training), tmp_path / "eager")
    of = experiment({"n_layer": 1}, {**training, "compile": True})
    counts, seconds = [], []

    def stop():
        seconds.append(calculate_time_spent()["total_wall_time"])
        return len(seconds) == 1

    counters.clear()  # of other tests
    with pytest.raises(Stopped):
        run(of, tmp_path / "a", should_stop=stop)
    counts.append(dict(counters["inductor"]))
    counters.clear()
    _, record = run(of, tmp_path / "a", should_stop=stop)
    counts.append(dict(counters["inductor"]))
    assert record.resumed_from == [1]
    assert ["fxgraph_cache_hit" in count for count in counts] == [False, True], counts
    assert record.compile_seconds >= 0.999 * (seconds[0] + seconds[-1]) > seconds[0] > 0
    assert eager.compile_seconds == 0
    assert_same_losses(eager, record, 1e-3)


def test_a_library_whose_compiler_was_killed_is_made_again(tmp_path, monkeypatch):
    """But one that another process is making, or has made."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "locks").mkdir()
    libraries = {
        "empty.main.so": b"", "zeros.so": bytes(64), "made.so": b"\0", "whole.so": b"\x7fELF",
    }  # fmt: skip
    for name, content in libraries.items():
        (tmp_path / "ab").mkdir(exist_ok=True)
        (tmp_path / "ab" / name).write_bytes(content)
    with FileLock(tmp_path / "locks" / "made.lock"):
        of = experiment(training={"compile": True})
        SummedLoss(model(of), of.training, None)
    assert sorted(path.name for path in tmp_path.glob("*/*.so")) == ["made.so", "whole.so"]


@pytest.mark.parametrize(
    ("shape", "training", "kernels"),
    [
        ({"sink": "learned"}, {}, "cpu_tiled"),
        ({"sink": "learned"}, {"compile": True}, "math"),  # which has none of the CPU's own kernels
        ({"attention_pattern": "GL", "window": 5}, {"compile": True}, "flash_attention"),
    ],
)
def test_the_attention_kernels_stand_beside_the_rate_of_a_training(
    tmp_path, monkeypatch, shape, training, kernels
):
    monkeypatch.setattr(torch, "compile", lambda run, **_: use_plain_code()(run))
    of = experiment(shape, {"tokens": 64 * 3, "evaluate_tokens": 80, **training})
    _, record = run(of, tmp_path)
    assert record.attention == kernels
    assert load_training_record(tmp_path).attention == kernels


def test_a_loss_that_rises_for_good_diverges_as_a_finding(tmp_path):
    """The rate is sane, then ruinous: weights stay finite, and what was learnt is gone."""
    training = {"tokens": 64 * 400, "batch_tokens": 64, "warmup_tokens": 64 * 400, "spike": 0.3}
    of = experiment(training={**training, "learning_rate": 20.0, "clip": 1e3})
    with pytest.raises(Diverged, match=r"mean loss of 32 steps rose from .* training.spike = 0.3"):
        run(of, tmp_path)
    assert load_training_record(tmp_path) is None


def test_a_loss_that_is_no_number_ends_it_before_the_weights_are_touched(tmp_path):
    of = experiment()
    broken = model(of)
    with torch.no_grad():
        broken.token_embedding.weight[3, 0] = float("inf")
    before = [p.clone() for p in broken.parameters()]
    with pytest.raises(Diverged, match=r"the loss is nan at step 0 of 24.*learning_rate = 0.01"):
        train(broken, DATA, of, seed=0, directory=tmp_path)
    assert all(map(torch.equal, before, broken.parameters()))
    assert load_training_record(tmp_path) is None


def test_another_trainings_checkpoint_is_refused(tmp_path):
    steps = iter(range(100))
    with pytest.raises(Stopped):
        run(experiment(), tmp_path, should_stop=lambda: next(steps) == 21)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000020", "step-00000022"]
    masked = experiment().data.model_copy(update={"mask_documents": True})
    for seed, other in (
        (0, experiment(training={"learning_rate": 2e-2})),
        (0, experiment(model={"n_kv_head": 1})),
        (0, experiment().model_copy(update={"data": masked})),
        (1, experiment()),
    ):
        with pytest.raises(StoreError, match="belongs to another training"):
            run(other, tmp_path, seed)


def test_the_text_of_a_gpu_is_in_pinned_memory(monkeypatch):
    """Else its copy would wait for the device."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t) or t)
    stepper = TrainStepper(model(experiment()), dataset(), experiment(), seed=0)
    assert len(stepper._read_batch(0)) == 2
    assert not pinned
    stepper.device = torch.device("cuda")
    batch = stepper._read_batch(0)
    assert [id(part) for part in batch] == [id(part) for part in pinned]


def test_the_next_steps_text_is_read_beside_a_step(monkeypatch, tmp_path):
    """Each batch once, in order, by another thread; the losses are those without it."""
    of = experiment()
    plain = train(model(of), dataset(), of, seed=0, directory=tmp_path / "plain")
    read, names = train_step.get_training_batch, []

    def note(tokens, **options):
        names.append((options["step"], threading.current_thread() is threading.main_thread()))
        return read(tokens, **options)

    monkeypatch.setattr(train_step, "READ_AHEAD_DEVICES", {"cpu"})
    monkeypatch.setattr(train_step, "get_training_batch", note)
    ahead = train(model(of), dataset(), of, seed=0, directory=tmp_path / "ahead")
    assert names == [(step, step == 0) for step in range(of.training.steps)]
    assert ahead.validation_curve == plain.validation_curve

    def fail(tokens, *, step, **options):
        if step == 3:
            raise DataError("block 3 does not verify")
        return read(tokens, step=step, **options)

    monkeypatch.setattr(train_step, "get_training_batch", fail)
    with pytest.raises(DataError, match="block 3"):
        train(model(of), dataset(), of, seed=0, directory=tmp_path / "damaged")
