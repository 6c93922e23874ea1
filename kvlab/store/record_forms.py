"""Read the sealed JSON files of the record, and check them before they are used.

A seal shows that a file is what was written, not that kvlab wrote it. A value of another type, or a
number that no trial can measure, is refused as damage, with its place in the file. Every reader
and `kvlab verify` read by `read_record`, so that they agree on what is damaged.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, FiniteFloat, InstanceOf
from typing_extensions import TypedDict

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.sealed_files import check_form, read_sealed_json
from kvlab.own_extensions import load_parts, name_members

SCHEMA = 1
"""Version of the files of trials and sweeps; later ones are read by later versions of kvlab."""

EndStatus = Literal["done", "failed", "diverged", "pruned"]
"""How a trial ended. ``pruned``: a search has paused its training, which any other sweep continues.
"""

Number = FiniteFloat
Seed = Annotated[str, Field(pattern=r"^[0-9]{1,20}$")]
Identifier = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Text = InstanceOf[str]
"""Any string: half a character, too, as in the name of a file."""
Object = dict[Text, Any]
Levels = dict[Text, Text]
Point = Annotated[list[Number], Field(min_length=3, max_length=3)]
OptionalText = Text | None
OptionalNumber = Number | None
OptionalObject = Object | None
Setting = Object | Text | bool | int | float | None
OptionalData = dict[Text, Text | dict[Text, Number] | None] | None
TrialId = Identifier | Literal[""]
_list: Any = list  # of a form, which is a value to mypy and no type
_dict: Any = dict
_make_form: Any = TypedDict


def _form(*parts: tuple[str, Any]) -> Any:
    """Return the form of an object from names and their type; one that ends with ``?`` may miss."""
    types = {
        name.rstrip("?"): NotRequired[kind] if name.endswith("?") else kind
        for names, kind in parts
        for name in names.split()
    }
    return _make_form("Form", types)


_CURVES = _form(("train_loss? validation_loss?", list[Point]))
_LINE = _form(
    ("part? metric? variant? unit?", Text),
    ("value? low? high?", OptionalNumber),
    ("note?", OptionalText),
)
_CELL = _form(("levels", Levels), ("trials", dict[Seed, TrialId]))
_PROVENANCE = _form(
    ("commit? command?", OptionalText),
    ("versions?", dict[Text, Text | None]),
    ("data?", OptionalData),
    ("started? finished?", Text),
    ("attempts?", int),
    ("code?", _form(("training", list[Text]), ("measurement", Text))),
)
_TIMED_TRIAL = _form(
    ("result", Text), ("measurements", dict[Text, Number]), ("benchmark", _list[_LINE])
)
_TIMING_SESSION = _form(
    ("seed", int),
    ("started finished device failure?", Text),
    ("threads", int),
    ("commit", OptionalText),
    ("trials", _dict[Identifier, _TIMED_TRIAL]),
)
_PAST = _form(
    ("params notes", Object),
    ("state", Text),
    ("values rungs", list[Number]),
    ("excess", dict[Text, Number]),
)
_POINT = _form(
    ("level trial why training", Text),
    ("past", _PAST),
    ("patch", Object),
    ("flops", Number),
    ("steps", int),
    ("kept", bool),
    ("cell", _CELL | None),
)
ProgressForm = _form(
    ("stage?", Text),
    ("step? steps?", int),
    ("loss? tokens_per_second? flops_per_second? mfu? peak_bytes?", OptionalNumber),
    ("process_bytes? seconds_left?", OptionalNumber),
    ("note?", OptionalText),
    ("curves?", _CURVES | None),
)

_LINES = [key for parts in load_parts().values() for key in parts.lines]

_FORMS = {
    "result.json": _form(
        ("schema", Literal[1]),
        ("trial training", Identifier),
        ("status", EndStatus),
        ("seed?", int),
        ("experiment?", dict[Text, Setting]),
        ("kv?", _form(
            ("owners?", list[int]),
            ("kinds?", Text),
            ("bytes_per_token? bytes_at_block_size?", Number),
        )),
        ("model?", _form(("parameters?", int), ("training_flops?", Number))),
        ("measurements?", dict[Text, Number]),
        ("curves?", _CURVES),
        ("benchmark?", _list[_LINE]),
        *((f"{key}?", list[dict[Text, OptionalNumber]]) for key in _LINES),
        ("training_record?", OptionalObject),
        ("error?", _form(("message type?", Text), ("traceback?", OptionalText)) | None),
        ("pruned?", _form(("step steps", int), ("loss", Number))),
        ("provenance?", _PROVENANCE),
        ("files?", dict[Text, Object]),
    ),
    "trial.json": _form(("trial training? trunk?", Identifier)),
    "sweep.json": _form(
        ("name", Text),
        ("question? design? yaml? experiment_yaml? command?", Text),
        ("factors", dict[Text, Annotated[list[Text], Field(min_length=1)]]),
        ("baseline?", Levels),
        ("seeds?", list[int]),
        ("cells", _list[_CELL]),
        ("patches?", dict[Text, dict[Text, Object]]),
        ("rules? notes?", list[Text]),
        ("decide? report? search? stages? size?", OptionalObject),
        *((f"{name}?", OptionalObject) for name in name_members("sequential_tests")),
        ("reported_seeds?", list[list[int]]),
    ),
    "search.json": _form(("search", Any), ("seconds flops?", Number)),
    "reported.json": _form(("seeds", list[list[int]])),
    "timings.json": _form(("sessions", _list[_TIMING_SESSION])),
    "training.json": _form(
        ("files", _form(("final/model.safetensors", Object))), ("code?", list[Text])
    ),
    "config.json": _form(),
    "start.json": _form(("source", Text)),
    "diverged.json": _form(("message", Text), ("code?", list[Text])),
    "rungs.json": _form(("rungs", _dict[Seed, _form(("step", int), ("loss", Number))])),
    "state.json": _form(("files", Object), ("state", _form(("code?", list[Text])))),
}  # fmt: skip

_IDENTITY = {"sweep.json": "name", "trial.json": "trial", "result.json": "trial"}
"""Which key names the folder that a file lies in."""


def read_record(path: Path) -> dict[str, Any]:
    """Read a sealed file of the record, of the form that its name says.

    Raises:
        RecordDamaged: It is not what was written, or of another kind, trial or sweep.
        StoreError: It cannot be read, or is of a later version of kvlab.
        FileNotFoundError: There is none.
    """
    content = read_sealed_json(path)
    schema = content.get("schema")
    is_later = path.name in _IDENTITY and type(schema) is int and schema > SCHEMA
    if is_later:  # not damaged: it must stay where it is
        text = f"{path} is of a later version of kvlab (schema {schema}; this one reads {SCHEMA})"
        raise StoreError(f"{text}; use that version")
    check_form(path, content, _POINT if path.parent.name == "points" else _FORMS[path.name])
    owner = content.get(_IDENTITY.get(path.name, ""), path.parent.name)
    if owner != path.parent.name:
        raise RecordDamaged(f"{path} is damaged: it is of {owner!r}")
    if path.name == "sweep.json" and content["factors"]:
        factors = {factor: set(levels) for factor, levels in content["factors"].items()}
        baseline = [content["baseline"]] if "baseline" in content else []
        for levels in [*baseline, *(cell["levels"] for cell in content["cells"])]:
            is_known = all(levels.get(factor) in known for factor, known in factors.items())
            if not is_known or levels.keys() - factors.keys():
                text = f"{path} is damaged: its factors do not have the cell"
                raise RecordDamaged(f"{text} {' '.join(levels.values())[:200]}")
    return content


def read_if_whole(path: Path) -> dict[str, Any]:
    """Return what `read_record` does; nothing if the file is not there, or is damaged."""
    try:
        return read_record(path)
    except (FileNotFoundError, RecordDamaged):
        return {}


@contextmanager
def refuse_malformed(what: str) -> Iterator[None]:
    """Raise RecordDamaged for values of a record that readers of the block cannot use.

    The forms cover what every reader uses. Of the rest, a reader finds out here.

    Args:
        what: Whose record is read, for the message.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if error.__class__.__module__.startswith("kvlab."):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        text = f"the record of {what} has a value that kvlab cannot read ({reason}, in"
        text += f" {Path(frame.filename).name}:{frame.lineno})"
        hint = "submit the sweep again, which writes its description anew, or look at its files"
        raise RecordDamaged(f"{text}; {hint}; if they are right, this is a bug") from error
