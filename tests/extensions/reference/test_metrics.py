"""`kvlab metrics`, and the families of measurements."""

import re

from kvlab.cli.main import main
from kvlab.extensions.reference.key_reference import list_key_sections
from kvlab.extensions.reference.metrics import FAMILIES
from kvlab.report.sections import SECTIONS
from kvlab.store.metrics import METRICS


def test_every_metric_is_in_one_family_whose_sections_and_keys_exist():
    own = [name for name in METRICS if not METRICS.is_offered(name)]
    assert all(sum(family.holds(name) for family in FAMILIES) == 1 for name in own)
    keys = {key.path for _, _, keys in list_key_sections("experiment") for key in keys}
    for family in FAMILIES:
        assert set(family.sections) <= SECTIONS.keys(), family.title
        assert {key for key in family.key.split(", ") if key} <= keys, family.title


def test_the_tables_hold_every_metric_once_with_its_unit(capsys):
    assert main(["metrics"]) == 0
    pattern = r"^\| `(\w+)` \| .* \| ([^|]+) \| (lower|higher|neither) \|"
    rows = re.findall(pattern, capsys.readouterr().out, re.M)
    assert sorted(rows) == sorted(
        (n, one.unit or "share", one.better) for n, one in METRICS.items()
    )
