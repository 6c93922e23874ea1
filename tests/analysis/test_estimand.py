"""What is compared with what: settings that enter a mean, and the reference of a cell."""

import itertools

import numpy as np
import pytest

from kvlab.analysis.effects import estimate_main_effects, list_compared_cells
from kvlab.analysis.estimand import Estimand
from tests.support.cells import FACTORS, make_cells, make_study

PATCHES = {
    "heads": {"mha": {}, "mqa": {"model.n_kv_head": 1}},
    "position": {"learned": {}, "rope": {"model.position": "rope"}},
    "sharing": {
        "none": {},
        "trained": {"model.kv_sharing": "adjacent:2"},
        "tied": {"serving.tie": "adjacent:2"},
    },
}
BYTES = {"mha": 12, "mqa": 1, "none": 2, "trained": 1, "tied": 1}
CELLS = tuple(itertools.product(*FACTORS.values()))


def stored(cells=CELLS):
    return {cell: BYTES[cell[0]] * BYTES[cell[2]] for cell in cells}


def estimand(cells=CELLS, **changes):
    return Estimand(cells, FACTORS, PATCHES, **{"kv_bytes": stored(cells), **changes})


def tied_study(decide=None, cost=lambda _: 0.0, seeds=3, **sweep):
    """A study whose ties cost one nat."""
    random = np.random.default_rng(0)

    def facts(cell):
        tokens = {"mha": 1000, "mqa": 1500}[cell[0]]
        experiment = {"data": {"tokenizer": "a"}, "training": {"tokens": tokens}}
        return {"experiment": experiment, "kv": {"bytes_at_block_size": stored()[cell]}}

    def weights(cell):
        return (*cell[:2], cell[2].replace("tied", "none"))

    noise = {weights(cell): random.normal(0, 0.01, seeds) for cell in CELLS if cell[2] != "tied"}
    losses = {c: 4 + cost(c) + (c[2] == "tied") + noise[weights(c)] for c in CELLS}
    rows = make_cells(losses, "loss_served", training=weights, record=facts)
    return make_study(rows, FACTORS, patches=PATCHES, decide=decide or {}, **sweep)


def cells_in(effect):
    return {cell for cell, weight in effect.weights.items() if weight}


def test_a_change_without_a_setting_served_as_trained_takes_all_settings():
    """Weights that are only ever served tied are compared so."""
    cells = [cell for cell in CELLS if cell[2] == "tied" or cell[:2] == ("mha", "learned")]
    found = estimand(cells)
    rows = make_cells(dict.fromkeys(cells, (1.0,)))
    heads = estimate_main_effects(rows, found, "loss")[0]
    assert {cell[2] for cell in cells_in(heads)} == {"tied"}
    compared = list_compared_cells(rows, (("heads", "mqa"),), found)
    assert compared == cells_in(heads)


@pytest.mark.parametrize(
    ("patch", "is_otherwise"),
    [
        ({"serving.tie": "adjacent:2"}, True),
        ({"serving.kv_dtype": "int4"}, True),
        ({"serving.kv_dtype": "int4", "training.kv_dtype": "int4"}, False),
        ({"serving.kv_dtype": "int4", "training.kv_dtype": "int8"}, True),
        ({"serving.compile": True}, False),
        ({"model.n_kv_head": 1}, False),
    ],
)
def test_serving_otherwise(patch, is_otherwise):
    factors = {"store": ("plain", "other")}
    one = Estimand([("plain",), ("other",)], factors, {"store": {"plain": {}, "other": patch}})
    assert one.is_served_otherwise(("other",)) == is_otherwise
    assert not one.is_served_otherwise(("plain",))
    serves_alone = all(key.startswith("serving.") for key in patch)
    assert one.changes_serving_alone((("store", "other"),)) == serves_alone


# References


def test_a_cell_is_compared_with_the_cell_that_shares_what_saves_nothing():
    found = estimand()
    assert found.free_levels == {("position", "rope")}
    assert found.reference(("mqa", "rope", "trained")) == ("mha", "rope", "none")
    assert found.reference(("mqa", "learned", "trained")) == ("mha", "learned", "none")
    assert found.reference(("mha", "rope", "none")) == ("mha", "rope", "none"), "it is one itself"
    assert found.references == (("mha", "learned", "none"), ("mha", "rope", "none"))


def test_a_reference_that_is_declared_and_bytes_that_must_be_equal_in_every_setting():
    found = estimand(kept=["position", "heads"])
    assert found.reference(("mqa", "rope", "tied")) == ("mqa", "rope", "none")
    study = tied_study(decide={"reference": ["heads"]})
    assert study.estimand.reference(("mqa", "learned", "tied")) == ("mqa", "learned", "none")
    sizes = stored()
    sizes["mqa", "rope", "trained"] += 1
    assert estimand(kv_bytes=sizes).free_levels == frozenset()
    del sizes["mqa", "rope", "trained"]
    assert estimand(kv_bytes=sizes).free_levels == frozenset(), "unknown is not equal"
