"""`kvlab check`: what holds of a user's file, a counterexample of what does not."""

import json
from pathlib import Path

import pytest

from kvlab.extensions.check.member_checks import CHECKS, SERVED_CHECKS
from tests.data.sources.test_user_documents import EXAMPLE as SOURCE
from tests.data.sources.test_user_documents import write as write_source
from tests.evaluate.test_token_metrics import FILE as METRIC
from tests.support.extensions import needs
from tests.support.tiny_sweep import run_kvlab

EXAMPLE = Path(__file__).parents[3] / "docs" / "extend" / "half_values.py"


@pytest.mark.parametrize(
    ("name", "checks"),
    [
        ("half_values", [*CHECKS]),
        ("decayed_sum", [*CHECKS]),
        ("ternary", ["each vector is stored by itself", *SERVED_CHECKS]),
        pytest.param(
            "last_attention",
            ["calls return and change what they may", *SERVED_CHECKS],
            marks=needs("eviction"),
        ),
    ],
)
def test_the_examples_of_the_page_hold(name, checks):
    code, out, _ = run_kvlab("check", EXAMPLE.with_stem(name), "--cases", "12", "--json")
    found = json.loads(out)
    assert (code, [one["check"] for one in found]) == (0, checks)
    assert not any(one["counterexample"] for one in found)
    by_check = {one["check"]: one["largest"] for one in found}
    assert max(by_check.values()) < 1e-10
    assert by_check["chunks equal single tokens, in the declared bytes"] > 0, (
        "its chunks were compared"
    )


def test_each_mistake_has_a_counterexample(tmp_path):
    mistakes = {
        "self.up(decode_stored(v, q.dtype))": "self.up(decode_stored(v, q.dtype)) / k.shape[2]",
        "return layer.head_dim * layer.head_dim // 2": "return 7",
        "decode_stored(v, q.dtype)": "decode_stored(v, q.dtype).detach()",
        "return attend(q, Keys(k), self.up(decode_stored(v, q.dtype)))": "return decode_stored(v)",
        "    def attend(": "    def store(self, parts, rope):\n        return parts\n\n    def attend(",
    }
    failed = []
    for number, (right, wrong) in enumerate(mistakes.items()):
        path = tmp_path / f"m{number}.py"
        assert EXAMPLE.read_text().count(right) == 1
        path.write_text(EXAMPLE.read_text().replace(right, wrong))
        code, out, _ = run_kvlab("check", str(path), "--cases", "8")
        assert code == 1
        failed.append([line.split("  ")[2] for line in out.splitlines() if "DOES NOT HOLD" in line])
        assert '    with {"model": {"vocab_size"' in out
    assert [one[0].rpartition(" (")[0] for one in failed] == [
        "cached logits equal those of one pass", "parameters are as declared",
        "gradients reach every weight", "tensors and numbers are as a layer needs them",
        "rotary positions count distances alone",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "right", "wrong", "said"),
    [
        ("ternary", "decode(self, packed", "decode(self, more, packed", "missing 1 required"),
        ("ternary", ".mean(-1, keepdim=True)", ".mean().expand_as(values[..., :1])", "depends on"),
        ("ternary", "float() - 1) *", "float() / 0 - 1) *", "not finite"),
        ("ternary", ".half()", "", "torch.float64"),
        ("ternary", "values.double().abs()", "values.abs_().double()", "encode changes what"),
        ("ternary", "scale.float()", "scale.mul_(2).float()", "decode changes what"),
        pytest.param(
            "last_attention", "mean(2)", "mean()", "returns () from rank", marks=needs("eviction")
        ),
        pytest.param(
            "last_attention",
            "step",
            "scores * scores.shape[-1] - step",
            "differ",
            marks=needs("eviction"),
        ),
        pytest.param(
            "last_attention",
            "return",
            "step.values.abs_(); return",
            "changes step.values",
            marks=needs("eviction"),
        ),
        pytest.param(
            "last_attention",
            "mean(2)",
            'mean(2) * float("nan")',
            "returns NaN",
            marks=needs("eviction"),
        ),
    ],
)
def test_mistakes_of_what_serves_have_a_counterexample(tmp_path, name, right, wrong, said):
    text = wrong.join(EXAMPLE.with_stem(name).read_text().rsplit(right, 1))
    (tmp_path / "m.py").write_text(text)
    code, out, _ = run_kvlab("check", tmp_path / "m.py", "--cases", "12")
    assert (code, said in out, '    with {"model": {"vocab_size"' in out) == (1, True, True), out


def test_settings_that_types_list_are_tried(tmp_path):
    text = EXAMPLE.with_stem("ternary").read_text()
    text = text.replace("Quantizer\n\n", "Quantizer, SpecModel\n\n").replace(
        "\n\nclass", "\n\nclass Options(SpecModel):\n    wide: bool = False\n\n\nclass", 1
    )
    text = text.replace("# a value", "\n    options = Options  # a value")
    path = tmp_path / "m.py"
    path.write_text(text)
    assert run_kvlab("check", path, "--cases", "6")[0] == 0
    path.write_text(text.replace("- 1) *", "- 1 + self.options.wide * torch.nan) *"))
    code, out, _ = run_kvlab("check", path, "--cases", "12")
    assert (code, '{"kv_dtype": {"ternary": {"wide": true}}' in out) == (1, True), out


TURN = """
TURN = torch.linalg.qr(torch.arange(16.0).outer(torch.arange(16.0)).cos())[0]


def turn(values, matrix):
    terms = [values[..., k, None] * matrix[k] for k in range(16)]
    return sum(terms[::-1] if values.shape[-2] % 2 else terms)  # as products of other shapes may
"""


def test_a_product_in_float32_is_told_from_a_mistake(tmp_path):
    text = EXAMPLE.with_stem("ternary").read_text()
    path = tmp_path / "m.py"
    path.write_text(
        text.replace("size % 4", "size - 16")
        .replace("values.double()", "turn(values, TURN).double()")
        .replace("(values /", "(turn(values, TURN) /")
        .replace(
            "return (codes.float() - 1) * scale.float()",
            "return turn((codes.float() - 1) * scale.float(), TURN.T)",
        )
        .replace("\n\nclass", f"\n{TURN}\n\nclass")
    )
    code, out, _ = run_kvlab("check", path, "--cases", "30")
    assert (code, "float64" in out) == (1, True), out
    path.write_text(path.read_text().replace("matrix[k]", "matrix[k].double()"))
    assert run_kvlab("check", path, "--cases", "30")[0] == 0


def test_tensors_of_a_wrong_shape_are_the_only_thing_said(tmp_path):
    path = tmp_path / "m.py"
    text = EXAMPLE.with_stem("decayed_sum").read_text()
    path.write_text(text.replace("return self.proj(y.transpose(1, 2).flatten(2))", "return y"))
    code, out, _ = run_kvlab("check", path, "--cases", "4", "--json")
    (found,) = json.loads(out)
    assert (code, found["check"]) == (1, "tensors and numbers are as a layer needs them")
    said = "m.py:10: DecayedSumModule.forward returns [(2, 4, 20, 16)]"
    assert found["counterexample"].startswith(said)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (
            "return attend(",
            "return torch.rand_like(q) + attend(",
            "two passes over one text differ",
        ),
        ("self.up(", "q.new_tensor(torch.nan) * self.up(", "logits are not finite"),
        ("layer, owns_kv, norm_eps):", "layer):", "TypeError: HalfValuesView.__init__() takes 2"),
    ],
)
def test_what_no_pass_may_do_is_the_only_thing_said(tmp_path, right, wrong, said):
    text = EXAMPLE.read_text().replace("from torch", "import torch\nfrom torch", 1)
    (tmp_path / "m.py").write_text(text.replace(right, wrong, 1))
    code, out, _ = run_kvlab("check", tmp_path / "m.py", "--cases", "4", "--json")
    (found,) = json.loads(out)
    assert (code, found["counterexample"].startswith(f"m.py:10: {said}")) == (1, True), out


@pytest.mark.parametrize(
    ("keys", "said"), [("Keys(k)", ""), ("Keys(2 * k)", "its first part, and")]
)
def test_a_form_attends_to_the_keys_that_it_says_it_stores(tmp_path, keys, said):
    text = EXAMPLE.read_text().replace('"v")', '"v")\n    stores_keys = True', 1)
    (tmp_path / "m.py").write_text(text.replace("Keys(k)", keys))
    code, out, _ = run_kvlab("check", tmp_path / "m.py", "--cases", "2")
    assert (code, said in out) == (int(bool(said)), True), out


def test_what_a_file_prints_is_beside_the_json(tmp_path):
    text = EXAMPLE.read_text().replace(
        "        k, v = parts", "        print('here')\n        k, v = parts"
    )
    (tmp_path / "m.py").write_text(text)
    code, out, err = run_kvlab("check", tmp_path / "m.py", "--cases", "1", "--json")
    assert (code, len(json.loads(out)), "here\n" in err) == (0, len(CHECKS), True)


def test_nan_of_a_mixer_is_not_laid_to_the_attention_beside_it(tmp_path):
    text = EXAMPLE.with_stem("decayed_sum").read_text()
    (tmp_path / "m.py").write_text(text.replace("y = weights @ values", "y = torch.nan * values"))
    _, out, _ = run_kvlab("check", tmp_path / "m.py", "--cases", "8", "--json")
    (found,) = json.loads(out)
    assert found["counterexample"].startswith("m.py:10: logits are not finite")


@needs("eviction")
def test_a_policy_that_counts_its_calls_is_refused(tmp_path):
    text = EXAMPLE.with_stem("last_attention").read_text()
    counted = "self.n = getattr(self, 'n', 0) + 1\n        return scores + self.n * "
    (tmp_path / "m.py").write_text(text.replace("return ", counted))
    code, out, _ = run_kvlab("check", tmp_path / "m.py", "--cases", "12")
    assert (code, "m.py:9: two passes over one text differ" in out) == (1, True), out


def test_products_are_checked_before_a_plan_takes_them(tmp_path):
    text = EXAMPLE.with_stem("decayed_sum").read_text()
    (tmp_path / "m.py").write_text(text.replace("return layer.out_width * tokens", "return 0.5"))
    code, out, _ = run_kvlab("check", tmp_path / "m.py", "--cases", "1")
    assert (code, "m.py:10: DecayedSum returns 0.5 from products" in out) == (1, True), out


def test_a_form_that_goes_with_no_model_says_why(tmp_path):
    path = tmp_path / "m.py"
    added = "    def find_problems(self, model):\n        yield 'kv', 'needs a moon'\n\n"
    path.write_text(EXAMPLE.read_text().replace("    def up_weights", f"{added}    def up_weights"))
    code, _, err = run_kvlab("check", path, "--cases", "2")
    assert (code, err.rpartition("; ")[2]) == (2, "it says of the first: needs a moon\n")


def test_a_file_that_fails_has_its_line(tmp_path):
    path = tmp_path / "f.py"
    path.write_text(EXAMPLE.read_text().replace("decode_stored(v", "decode_stored(w"))
    code, out, _ = run_kvlab("check", str(path), "--cases", "2")
    assert code == 1
    assert "f.py:29: NameError: name 'w' is not defined" in out
    code, _, err = run_kvlab("check", str(tmp_path / "none.py"))
    assert (code, err.count("cannot be read")) == (2, 1)
    assert run_kvlab("check", str(EXAMPLE), "--cases", "0")[0] == 2


def test_check_shows_a_metric_that_depends_on_the_tokens_beside_it(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        METRIC.replace("tokens.logits >", "tokens.logits - tokens.logits.mean() >")
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_kvlab("check", "mine.py", "--cases", "20")
    assert code == 1
    assert "DOES NOT HOLD" in out
    assert "tokens are scored as" in out


def test_a_name_of_a_metric_of_kvlab_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(METRIC.replace('"rank"\n', '"loss"\n'))
    code, _, err = run_kvlab("check", path)
    assert (code, "mine.py:4: loss is a metric of kvlab itself" in err) == (2, True)


def test_check_reads_a_source_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_source(tmp_path)
    code, out, _ = run_kvlab("check", "mine.py", "--json")
    (found,) = json.loads(out)
    assert (code, found["member"], found["cases"], found["counterexample"]) == (0, "sums", 100, "")
    write_source(tmp_path, "            pass\n        yield from {str(n) for n in numbers}")
    code, out, _ = run_kvlab("check", "mine.py", "--json")
    assert (code, json.loads(out)[0]["counterexample"].count("in another process")) == (1, 1)
    write_source(tmp_path, "            yield first")
    code, out, _ = run_kvlab("check", "mine.py")
    assert (code, out.count("    data.source = sums fails at mine.py:18: ")) == (1, 1)
    write_source(
        tmp_path, text=SOURCE.read_text().replace('"sums"', '"sums"\n    reads_paths = True')
    )
    assert run_kvlab("check", "mine.py")[0] == 2


def test_paths_that_no_source_reads_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_source(tmp_path)
    code, _, error = run_kvlab("check", "mine.py", "--paths", "texts")
    assert (code, error) == (2, "no source of mine.py reads data.paths; remove --paths\n")
