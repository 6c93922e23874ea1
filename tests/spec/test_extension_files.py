"""`extensions:`: files of users are run from a YAML, kept in the record, and refused with a line."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.errors import SpecError
from kvlab.layout import KVLayout
from kvlab.spec import Experiment, extension_files, load_experiment
from kvlab.spec.extension_files import describe_error
from kvlab.spec.members import MemberError
from kvlab.store.result import Failure
from kvlab.trial.fingerprint import training_identity
from kvlab.trial.trial import Trial

EXAMPLE = Path(__file__).parents[2] / "docs" / "extend" / "half_values.py"
YAML = """\
name: mine
extensions: [mine.py]
model: {vocab_size: 257, block_size: 32, n_layer: 2, n_head: 2, n_embd: 16, kv: half_values}
data: {tokenizer: bytes}
benchmark: {prompt_tokens: 8, new_tokens: 8}
"""
MIXER_YAML = YAML.replace(
    "kv: half_values", "attention_pattern: MG, kinds: {M: {mixer: decayed_sum}}"
)


def write(folder, text=None, yaml=YAML):
    (folder / "mine.py").write_text(EXAMPLE.read_text() if text is None else text)
    (folder / "e.yaml").write_text(yaml)
    return folder / "e.yaml"


def test_a_form_has_bytes_and_its_code_is_in_the_id(tmp_path):
    experiment = load_experiment(write(tmp_path))
    own, plain = (KVLayout.of(one.model).stored_bytes(1, 32, "float32") for one in
                  (experiment, load_experiment(tmp_path / "e.yaml", {"model.kv": "separate"})))  # fmt: skip
    assert own == 0.75 * plain
    trial = Trial.of(experiment, "text", 0)
    commented = load_experiment(write(tmp_path, f"# a comment\n{EXAMPLE.read_text()}"))
    assert Trial.of(commented, "text", 0).id == trial.id
    edited = load_experiment(write(tmp_path, EXAMPLE.read_text().replace("// 2", "// 4", 1)))
    assert Trial.of(edited, "text", 0).id != trial.id
    assert training_identity(experiment, "text", 0)["model"]["kv"] == "half_values"


NARROW = (EXAMPLE.parent / "narrow_values.py").read_text()
TWO = {"narrow_values": {"size": 2}}


def test_a_form_has_settings(tmp_path):
    yaml = write(tmp_path, NARROW, YAML.replace("half_values", "narrow_values"))
    named = load_experiment(yaml)
    eight, two = (
        load_experiment(yaml, {"model.kv": {"narrow_values": {"size": size}}}) for size in (8, 2)
    )
    assert eight == named
    assert two.model.kv_form.name == "narrow_values"
    assert two.model.kv_form is load_experiment(yaml, {"model.kv": TWO}).model.kv_form
    sizes = [KVLayout.of(one.model).stored_bytes(1, 32, "float32") for one in (named, two)]
    assert sizes == [2 * 2 * (8 + size) * 32 * 4 for size in (8, 2)]
    ids = {Trial.of(one, "text", 0).id for one in (named, eight, two)}
    assert len(ids) == 2
    assert training_identity(two, "text", 0)["model"]["kv"] == TWO
    assert Experiment.model_validate_json(two.model_dump_json()) == two


def test_a_mixer_has_settings(tmp_path):
    text = (EXAMPLE.parent / "decayed_sum.py").read_text()
    text = text.replace("import Extension", "import SpecModel, Extension")
    settings = "class Rate(SpecModel):\n    size: int = 4\n\n\nclass DecayedSum(Mixer):\n"
    text = text.replace("class DecayedSum(Mixer):\n", f"{settings}    options = Rate\n")
    yaml = write(tmp_path, text, MIXER_YAML)
    four, two = (
        load_experiment(yaml, {"model.kinds.M.mixer": mixer}).model
        for mixer in ("decayed_sum", {"decayed_sum": {"size": 2}})
    )
    assert [one.layers[0].mixer.options.size for one in (four, two)] == [4, 2]
    assert four.computation() != two.computation()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("narrow_values: {sise: 2}", ".sise = 2 is no option of narrow_values; use size"),
        ("narrow_values: {size: x}", ".size = x is not a whole number"),
        ("narrow_values: 2", " = 2 is not a mapping"),
        (
            "narow_values: {size: 2}",
            " = {...} is no KVForm with settings; did you mean narrow_values?",
        ),
    ],
)
def test_settings_that_a_form_does_not_have(tmp_path, value, message):
    yaml = write(tmp_path, NARROW, YAML.replace("half_values", f"{{{value}}}"))
    with pytest.raises(SpecError, match="e.yaml:3:") as error:
        load_experiment(yaml)
    assert f": model.kv.{value.partition(':')[0]}{message}" in str(error.value)


def test_a_form_without_settings_is_given_none(tmp_path):
    yaml = write(tmp_path, yaml=YAML.replace("half_values", "{half_values: {size: 2}}"))
    with pytest.raises(
        SpecError, match="and half_values takes no settings here; write its name alone"
    ):
        load_experiment(yaml)


def test_other_processes_run_the_text_that_comes_with_a_trial(tmp_path):
    experiment = load_experiment(write(tmp_path, NARROW), {"model.kv": TWO})
    trial = Trial.of(experiment, "text", 0)
    (tmp_path / "mine.py").unlink()
    (tmp_path / "trial").write_bytes(pickle.dumps(trial))
    program = (
        "import pickle, sys; from kvlab.model import GPT\n"
        "trial = pickle.load(open(sys.argv[1], 'rb'))\n"
        "up = GPT(trial.experiment.model).blocks[0].attention.kv.up\n"
        "print(trial.id, *up.weight.shape)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "trial")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{trial.id} 8 2\n"


def test_a_record_keeps_the_text_and_runs_it_only_if_it_is_trusted(tmp_path, monkeypatch):
    experiment = load_experiment(write(tmp_path, f"{EXAMPLE.read_text()}\nONLY_HERE = 1\n"))
    kept = experiment.model_dump(mode="json")
    assert kept["extensions"] == {"mine.py": (tmp_path / "mine.py").read_text()}
    assert kept["model"]["kv"] == "half_values"
    again = Experiment.model_validate_json(json.dumps(kept))
    assert again == experiment
    monkeypatch.setattr(extension_files, "_trusted", set())
    with pytest.raises(ValueError, match=r"has mine.py, code of a record .* `kvlab check`"):
        Experiment.model_validate(kept)


BODY = "class Form(KVForm):\n    name, view, parts = 'form', 'View', ('v',)\n"
HEAD = "from kvlab.extend import Extension, KVForm, StoredVectors\nView = 1\n"
STORED = "    def stored(self, layer):\n        return "
PROBLEMS = f"{STORED}(StoredVectors(1, 8),)\n    def find_problems(self, model):\n        return "
END = "\nextension = Extension(kv_forms=(Form(),))\n"
HAS = "e.yaml:2:13: extensions = {...} has mine.py:"
MISTAKES = {
    "import sys\nsys.exit(3)\n": "mine.py:2:1: fails: SystemExit: 3",
    "x = (": "mine.py:1:5: is no Python",
    "\nimport nothing_such": "mine.py:2:1: fails: ModuleNotFoundError",
    "x = 1\ny = 2\n": "mine.py:2:1: has no `extension`",
    f"{HEAD}{BODY}{END}": "mine.py:6:1: fails: TypeError",
    f"{HEAD}{BODY}{STORED}()".replace("'form'", "'separate'")
    + END: "mine.py:3:1: Form has name = 'separate'",
    f"{HEAD}{BODY}{STORED}()".replace("'View'", "'Other'")
    + END: "mine.py:3:1: Form has view = 'Other'",
    f"{HEAD}{BODY}{STORED}()".replace("('v',)", "()") + END: "mine.py:3:1: Form has parts = ()",
    f"{HEAD}{BODY}{STORED}()\n    @property\n    def name(self):\n        return 1 / 0".replace(
        "name, ", "_, "
    )
    + END: "mine.py:9:1: fails: ZeroDivisionError",
    f"{HEAD}{BODY}    source = 'a paper'\n{STORED}(){END}": "mine.py:3:1: Form has source, which kvlab",
    f"{HEAD}{BODY}{STORED}layer.nothing{END}": f"{HAS}6: fails: AttributeError",
    f"{HEAD}{BODY}{STORED}()" + END: f"{HAS}3: Form returns () from stored; return a tuple of",
    f"{HEAD}{BODY}{STORED}StoredVectors(1, 8)" + END: f"{HAS}3: Form returns StoredVectors(",
    f"{HEAD}{BODY}{STORED}(StoredVectors(1, 8 / 2),)"
    + END: f"{HAS}3: Form returns (StoredVectors(",
    f"{HEAD}{BODY}{PROBLEMS}'no'{END}": f"{HAS}3: Form returns 'no' from find_problems; return",
    f"{HEAD}{BODY}{PROBLEMS}iter(['no']){END}": f"{HAS}3: Form returns ['no'] from find_problems;",
    f"{HEAD}{BODY}{PROBLEMS}None{END}": f"{HAS}3: Form returns None from find_problems; return",
    f"{HEAD}{BODY}    options = 3\n{STORED}(){END}": "mine.py:3:1: Form has options = 3",
    f"{HEAD}{BODY}    key_dim = 24\n{STORED}(){END}": "mine.py:3:1: Form has key_dim = 24; write it as"
    " def key_dim(self, layer)",
    f"{HEAD}{BODY}    def rotated_dims(self, layer):\n        return 4\n{STORED}(){END}": "mine.py:3:1: "
    "Form has rotated_dims(layer); write it as def rotated_dims(self, head_dim, share)",
    f"{HEAD}extension = Extension(kv_forms=(1,))\n": "mine.py:3:1: kv_forms has 1",
    f"{HEAD}{BODY}{STORED}()"
    + END.replace("(Form(),)", "(Form,)"): "mine.py:3:1: kv_forms has Form",
    f"{HEAD}{BODY}{STORED}()"
    + END.replace("(Form(),)", "Form()"): "mine.py:7:1: kv_forms = Form() is not a tuple",
    f"{HEAD}{BODY}{STORED}()".replace("'form'", "''") + END: "mine.py:3:1: Form has name = ''",
    f"{HEAD}{BODY}{STORED}()".replace("('v',)", "('v', 'v')")
    + END: "mine.py:3:1: Form has parts = ('v', 'v'); give each a name of its own",
    f"{HEAD}{BODY}{STORED}()".replace("('v',)", "('q',)")
    + END: "mine.py:3:1: Form has parts = ('q'",
}


def test_a_byte_order_mark_is_no_text_of_a_file(tmp_path):
    experiment = load_experiment(write(tmp_path))
    (tmp_path / "mine.py").write_text(EXAMPLE.read_text(), encoding="utf-8-sig")
    assert load_experiment(tmp_path / "e.yaml") == experiment


def test_what_a_file_prints_is_no_output(tmp_path, capsys):
    text = EXAMPLE.read_text().replace("        keys =", "        print('stored')\n        keys =")
    experiment = load_experiment(write(tmp_path, f"print('hello')\n{text}"))
    assert KVLayout.of(experiment.model).stored_bytes(1, 8, "float32")
    out, err = capsys.readouterr()
    assert (out, {*err.split()}) == ("", {"hello", "stored"})


@pytest.mark.parametrize(("text", "message"), MISTAKES.items(), ids=range(len(MISTAKES)))
def test_mistakes_have_their_line(tmp_path, text, message):
    yaml = write(tmp_path, text, YAML.replace("half_values", "form"))
    with pytest.raises(SpecError) as error:
        load_experiment(yaml)
    assert str(error.value).startswith(f"{tmp_path}/{message}")


@pytest.mark.parametrize(
    ("returned", "share", "message"),
    [
        ("3", 1, "kv = half_values rotates 3 of 8 dimensions of a head, and pairs rotate; return"),
        ("10", 1, "kv = half_values rotates 10 of 8 dimensions of a head"),
        ("4", 0.25, "rotary_share = 0.25 changes nothing under kv: half_values, which rotates 4"),
        ("4", 1, None),
        ("2 * round(share * head_dim)", 0.25, None),
    ],
)
def test_what_a_form_rotates_is_pairs_and_a_share_that_it_does_not_read_is_refused(
    tmp_path, returned, share, message
):
    own = f"    def rotated_dims(self, head_dim, share):\n        return {returned}\n\n    def up_w"
    text = EXAMPLE.read_text().replace("    def up_w", own)
    shape = f"position: rope, rotary_share: {share}, kv: half_values"
    path = write(tmp_path, text, YAML.replace("kv: half_values", shape))
    if message is None:
        assert load_experiment(path).model.layers[0].rotary_dim == 4
        return
    with pytest.raises(SpecError) as error:
        load_experiment(path)
    assert f": model.{message}" in str(error.value)


def test_two_files_with_one_name_are_refused(tmp_path):
    yaml = write(tmp_path, yaml=YAML.replace("[mine.py]", "[mine.py, other.py]"))
    (tmp_path / "other.py").write_text(EXAMPLE.read_text().replace("// 2", "// 4"))
    with pytest.raises(SpecError) as error:
        load_experiment(yaml)
    assert "half_values in mine.py and in other.py" in str(error.value)
    (tmp_path / "other.py").write_text(NARROW)
    assert len(load_experiment(yaml).extensions) == 2


def test_a_file_stands_alone(tmp_path):
    (tmp_path / "helper.py").touch()
    with pytest.raises(SpecError, match=r"mine.py:1:1: imports helper beside it"):
        load_experiment(write(tmp_path, f"import helper\n{EXAMPLE.read_text()}"))


@pytest.mark.parametrize("method", ["weights", "decode_flops", "state"])
def test_arithmetic_that_gives_no_number_has_its_line(tmp_path, method):
    text = EXAMPLE.with_stem("decayed_sum").read_text()
    text = text.replace("return 2 * model.n_embd", "return 0.5 * model.n_embd")
    text = text.replace("return 3 * layer.out_width", "return None")
    text = text.replace("((layer.n_head, 1, layer.head_dim),)", "(layer.n_head,)")
    (tmp_path / "mine.py").write_text(text)
    model = load_experiment(write(tmp_path, text, MIXER_YAML)).model
    layer = model.layers[0]
    given = {"weights": (model, 0), "decode_flops": (layer, 3), "state": (layer,)}[method]
    with pytest.raises(MemberError) as error:
        getattr(layer.mixer, method)(*given)
    assert describe_error(error.value).startswith("mine.py:10: DecayedSum returns ")
    assert f" from {method}; return a " in str(error.value)


@pytest.mark.parametrize(
    ("mistake", "hint"),
    [
        ("settings = ('heads',)", "name keys of model.kinds"),  # has none of this name
        ("settings = ('window',)", "name keys of .*, of n_kv_head, head_dim"),  # of attention
        ("settings, letter = (), 'M'", "leave it out"),  # a pattern has those of kinds
    ],
)
def test_a_mixer_names_keys_of_kinds_and_no_letter(tmp_path, mistake, hint):
    text = EXAMPLE.with_stem("decayed_sum").read_text().replace("settings = ()", mistake)
    with pytest.raises(SpecError, match=f"mine.py:10:1: DecayedSum has .*; {hint}"):
        load_experiment(write(tmp_path, text))


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("mine.py", "2:13: extensions is not a list of Python files"),
        ("[other.py]", "2:14: extensions.0 = other.py cannot be read (No such file"),
        ("[mine.py, ./mine.py]", "2:23: extensions.1 = ./mine.py has the name of another file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, yaml, message):
    path = write(tmp_path, yaml=YAML.replace("[mine.py]", yaml))
    with pytest.raises(SpecError, match=r"extensions") as error:
        load_experiment(path)
    assert str(error.value).startswith(f"{path}:{message}")


def test_a_failure_in_a_file_is_recorded_with_its_place(tmp_path):
    text = EXAMPLE.read_text().replace("return keys, Stored", "return keys, 1 // 0, Stored")
    write(tmp_path, text)
    form = extension_files.load_extension(extension_files.read_extension(tmp_path / "mine.py"))
    with pytest.raises(ZeroDivisionError) as error:
        form.members[0].stored(load_experiment(write(tmp_path)).model.layers[0])
    message = Failure.from_error(error.value).message
    line = 1 + text[: text.index("1 // 0")].count("\n")
    assert message.startswith(f"mine.py:{line}: integer")
