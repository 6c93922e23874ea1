"""Digests of the code: which modules count, and what of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import kvlab
from kvlab.own_extensions import load_parts
from kvlab.spec.benchmark_config import MEASURES
from kvlab.spec.dtypes import DTYPES
from kvlab.spec.mixers import MIXERS, find_mixer
from kvlab.trial.code_identity import (
    MEASUREMENT,
    TRAINING,
    CodeIdentity,
    TrialCode,
    digest_source,
    is_counted,
    read_code,
    this_code,
)
from tests.support.code_versions import running_code

# what a table names, which no import shows
_MIXERS = tuple(find_mixer(name).module.partition(":")[0] for name in MIXERS)
_PARTS = load_parts().values()
# where each begins
ENTRIES = {
    TRAINING: (
        "kvlab.train.loop", "kvlab.trial.initial_weights_loader", "kvlab.trial.ddp",
        # found by name
        *_MIXERS, *(module for parts in _PARTS for module in parts.training_code),
    ),
    MEASUREMENT: (
        "kvlab.trial.torch_trainable", "kvlab.evaluate", "kvlab.benchmark.benchmark_stage",
        *_MIXERS,
        *(module for parts in _PARTS for module in parts.measurement_code),
    ),
}  # fmt: skip
# What is imported and decides nothing, looked at one by one; of a name with a dot the whole package.
# Messages, files and records; owner maps, specs and texts, of which all that counts is in the ids.
EVERYWHERE = (
    "errors fs. humanize own_extensions sharing. store. trial. spec spec.experiment"
    " spec.checkpoint_tools spec.extension_files spec.flops spec.members spec.presets"
    " spec.source_options spec.spec_model"
    " data.data_dir data.dataset_preparation data.shards"
)
DECIDES_NOTHING = {
    TRAINING: "cache. layout. oom data.tokenizers",  # K/V that no step stores, bytes, messages
    MEASUREMENT: (
        "oom extensions.recall.config train. spec.data_config spec.overrides spec.token_metrics"
        " spec.training_config spec.validation_errors data.requirements data.text_formats"
    ),
}
PACKAGE = Path(kvlab.__file__).parent


@pytest.fixture(scope="module")
def imports():
    return grimp.build_graph("kvlab", exclude_type_checking_imports=True)


def follow(graph, scope):
    """Return every module that is imported from the entries, directly or not.

    The imports of modules that do not count are not followed.
    """
    seen, waiting = set(), list(ENTRIES[scope])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            if is_counted(module, scope) or module in ENTRIES[scope]:
                waiting += graph.find_modules_directly_imported_by(module)
    return seen


@pytest.mark.parametrize("scope", [TRAINING, MEASUREMENT], ids=["training", "measurement"])
def test_every_imported_module_counts_or_is_known_to_decide_nothing(scope, imports):
    assert [one for one in ENTRIES[scope] if one not in imports.modules] == []
    found = follow(imports, scope)
    known = (EVERYWHERE + " " + DECIDES_NOTHING[scope]).split()
    left_out = {one.removeprefix("-kvlab.") for one in scope if one.startswith("-")}
    for one in (one.removeprefix("kvlab.") for one in found if not is_counted(one, scope)):
        is_known = one in left_out or one in known
        assert is_known or any(f"{one}.".startswith(name) for name in known if name[-1] == "."), one
    for listed in (one.removeprefix("-") for one in scope):
        assert any(f"{one}.".startswith(f"{listed}.") for one in {*found, *imports.modules}), listed


def test_what_tables_name_counts_which_no_import_shows():
    assert not is_counted("kvlab.cache.kv_buffer", TRAINING)
    for one in (*(m.module for m in MEASURES.values()), *(d.kv_format for d in DTYPES.values())):
        assert is_counted(one.partition(":")[0], MEASUREMENT), one


@pytest.fixture
def package(tmp_path):
    """A copy of the installed package, as from a wheel: no git, no project around it."""
    folder = tmp_path / "kvlab"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_a_copy_without_git_has_the_same_digests_and_needs_no_torch(package):
    program = (
        "import sys; from kvlab.trial.code_identity import this_code; one = this_code()\n"
        "print(one.training, one.measurement, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", program]
    environment = {"PYTHONPATH": str(package.parent), "PATH": ""}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    now = this_code()
    assert shown.stdout.split() == [now.training, now.measurement, "False"]


def edit(package, module, old, new):
    path = package / f"{module}.py"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_an_edit_changes_the_digests_of_what_it_decides(tmp_path):
    package = tmp_path / "kvlab"
    for name in ("model", "report", "evaluate", "train"):
        shutil.copytree(PACKAGE / name, package / name)
    before = read_code(package)
    edit(package, "model/attention", "import", "# a comment\n\n\nimport")
    edit(package, "report/markdown", '"""', '"""Other words. ')
    edit(package, "model/gpt", '"""', '"""Other words. ')
    assert read_code(package) == before
    edit(package, "report/markdown", "import", "import os\nimport")
    assert read_code(package) == before
    edit(package, "evaluate/hellaswag", "import", "import os\nimport")
    measured = read_code(package)
    assert measured.training == before.training
    assert measured.measurement != before.measurement
    edit(package, "train/train_step", "import", "import os\nimport")
    trained = read_code(package)
    assert trained.training != before.training
    assert trained.measurement == measured.measurement
    (package / "model" / "new.py").write_text("x = 1\n")
    both = read_code(package)
    assert (both.training == trained.training, both.measurement == trained.measurement) == (0, 0)


def test_without_sources_the_code_is_unknown(tmp_path):
    (tmp_path / "kvlab").mkdir()
    assert read_code(tmp_path / "kvlab") == CodeIdentity("", "")


SOURCE = '''
"""Words."""
def f(x: int = 1, *, y=None) -> str:
    """Words."""
    return f"{x!r:>{y}}" "" f"{x}" + ("a" "b")  # a comment
class C: ...
'''


def test_a_digest_is_the_same_from_every_python():
    # as computed by Python 3.11, 3.12 and 3.13
    assert digest_source(SOURCE.encode())[:16] == "8e11c27db5ee1dc8"


@pytest.mark.parametrize(
    ("one", "other"),
    [("f()", "f('')"), ("x = 1", "x = 1.0"), ("x = '1'", "x = 1"), ("f(a)", "f(*a)")],
)
def test_what_differs_has_another_digest(one, other):
    assert digest_source(one.encode()) != digest_source(other.encode())


def test_the_code_of_a_trial_against_this_code():
    with running_code("t1", "m1"):
        assert TrialCode(("t1",), "m1").compare() == "same"
        assert TrialCode(("t1", "t2"), "m1").compare() == "other"
        assert TrialCode(("t1",), "m2").compare() == "other"
        assert TrialCode(("", "t2"), "m1").compare() == "other"
        assert TrialCode(("", "t1"), "m1").compare() == "unknown"
        assert TrialCode().compare() == TrialCode.of(None).compare() == "unknown"
        code = {"training": ["t1"], "measurement": "m1"}
        assert TrialCode.of(code).compare() == "same"
    with running_code("", ""):  # no sources
        assert TrialCode(("t1",), "m1").compare() == "unknown"
