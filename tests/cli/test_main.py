"""The `kvlab` command and its table of commands."""

import subprocess
import sys

import pytest

from kvlab.cli import commands
from kvlab.cli.commands import COMMANDS
from kvlab.cli.main import main
from kvlab.cli.shared_arguments import default_store, find_sweep_file, project_path
from kvlab.errors import UsageError
from tests.support.tiny_sweep import EXPERIMENT, write_tiny_sweep

TOY_COMMAND = """
def add_arguments(parser):
    parser.add_argument("name")

def run(options):
    print(f"hello {options.name}")
    return 3
"""


def test_a_command_is_added_by_a_module_and_a_line_in_the_table(tmp_path, monkeypatch, capsys):
    (tmp_path / "greet.py").write_text(TOY_COMMAND)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    monkeypatch.setitem(COMMANDS, "greet", "greet somebody")
    assert main(["greet", "Ada"]) == 3
    assert capsys.readouterr().out == "hello Ada\n"
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "greet somebody" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from kvlab.cli.main import main; from kvlab.cli.commands import COMMANDS\n"
        "for command in ['', *COMMANDS]:\n"
        "    try: main([*command.split(), '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "    heavy = {'torch', 'ray', 'mlflow', 'optuna', 'scipy', 'matplotlib', 'transformers',"
        " 'rich'}\n"
        "    assert not heavy & set(sys.modules), (command, heavy & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("usage: kvlab") == len(COMMANDS) + 1


def test_a_project_is_found_from_any_folder_below_it(tmp_path, monkeypatch):
    for folder in ("sweeps", "experiments", "notes/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sweeps" / "heads.yaml").write_text("question: q\n")
    (tmp_path / "sweeps" / "other.yaml").write_text("question: q\nname: wide\n")
    monkeypatch.chdir(tmp_path / "notes" / "deep")
    assert (default_store(), project_path("reports")) == ("../../runs", "../../reports")
    assert find_sweep_file("heads") == "../../sweeps/heads.yaml"
    assert find_sweep_file("wide") == "../../sweeps/other.yaml"
    with pytest.raises(UsageError, match=r"sweep = haeds is neither .* did you mean heads\?"):
        find_sweep_file("haeds")
    monkeypatch.chdir(tmp_path)
    assert default_store() == "runs"
    monkeypatch.chdir(tmp_path.parent)
    assert default_store() == "runs"


@pytest.mark.parametrize("arguments", [[], ["nosuch"], ["plan"], ["submit", "x.yaml", "--nosuch"]])
def test_wrong_arguments_exit_with_2_and_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: kvlab" in capsys.readouterr().err


def test_errors_are_shown_in_the_order_of_the_file_and_a_store_is_no_file(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    write_tiny_sweep(tmp_path)
    wrong = EXPERIMENT.replace("n_layer: 2", "n_layer: two").replace("repeats", "repeat")
    (tmp_path / "e.yaml").write_text(wrong)
    assert main(["plan", "s.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0].split(":")[:2] for line in lines] == [
        ["e.yaml", "2"], ["e.yaml", "6"],
    ]  # fmt: skip
    (tmp_path / "e.yaml").write_text(EXPERIMENT)
    (tmp_path / "runs").write_text("")
    assert main(["plan", "s.yaml"]) == 1
    assert "--store" in capsys.readouterr().err
