"""Optuna's samplers: their arguments are checked, and resuming changes nothing."""

import math
import random

import pytest

from kvlab.errors import SpecError
from kvlab.extensions.search.history import Observation
from kvlab.extensions.search.optuna_sampler import estimate_importances, suggest_params
from kvlab.spec.search_config import SearchConfig
from tests.support.stub_search import SEARCH, STEPS, searching


def test_a_space_that_is_gone_through_is_gone_through_whole(tmp_path):
    text = STEPS.replace("trials: 12", "trials: 10\n  sampler: brute_force")
    _, search, driver = searching(tmp_path, text)
    driver.run()
    points_tried = {tuple(point.patch.values()) for point in search.suggestions if point.has_trial}
    rates = {round(0.02 * n, 6) for n in range(1, 6)}
    assert {(heads, round(rate, 6)) for heads, rate in points_tried} == {
        (h, r) for h in (1, 2) for r in rates
    }


def test_a_low_discrepancy_sequence_goes_on_where_it_was():
    """Suggestions made one by one from the history equal those of one Optuna study."""
    config = SearchConfig.model_validate(
        {"ranges": {f"training.x{n}": {"low": 0.0, "high": 1.0} for n in range(2)},
         "objectives": ["loss"], "sampler": "qmc", "seed": 1, "trials": 99}
    )  # fmt: skip
    past = []
    for _ in range(17):
        one = suggest_params(config, ["minimize"], past)
        past.append(Observation(one.params, "ok", [0.0], sampler_attrs=one.sampler_attrs))
    points = [tuple(one.params.values()) for one in past[1:]]  # the first is drawn by chance
    assert len(set(points)) == 16
    cells = {(math.floor(4 * x), math.floor(4 * y)) for x, y in points}
    assert len(cells) == 16  # a (0, 4, 2)-net: one of 16 in each of 16 squares


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ("CmaEsSampler", "Optuna refuses CmaEsSampler: No module named 'cmaes'"),
        ("{name: tpe, seed: 3}", "search.sampler.seed is not an argument of TPESampler"),
        ("{name: nsgaii, population_size: 1}", "NSGAIISampler: `population_size` must be greater"),
    ],
)
def test_what_optuna_does_not_take_is_refused(tmp_path, sampler, expected):
    with pytest.raises(SpecError, match=expected):
        searching(tmp_path, SEARCH.replace("seed: 3", f"sampler: {sampler}"))


def test_importances_rank_what_the_objective_depends_on():
    config = SearchConfig.model_validate({
        "choices": {"model.n_kv_head": [1, 2], "model.position": ["learned", "rope"]},
        "ranges": {"training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True}},
        "objectives": ["loss", "kv_bytes", "parameters"],
        "trials": 30,
    })  # fmt: skip
    rng = random.Random(0)
    measured = []
    for _ in range(20):
        rate, heads = 10 ** rng.uniform(-4, -1), rng.randrange(2)
        params = {
            "model.n_kv_head": heads, "model.position": rng.randrange(2),
            "training.learning_rate": rate,
        }  # fmt: skip
        loss = (math.log10(rate) + 2) ** 2 + 0.01 * heads
        measured.append(Observation(params, "ok", [loss, 512.0 * (1 + heads), 1000.0]))
    directions = ("minimize", "minimize", "minimize")
    found = estimate_importances(config, directions, measured)
    assert list(found) == ["loss", "kv_bytes"]  # the parameters are the same everywhere
    for objective, first in (("loss", "training.learning_rate"), ("kv_bytes", "model.n_kv_head")):
        assert next(iter(found[objective])) == first
        assert found[objective][first] > 0.9
        assert sum(found[objective].values()) == pytest.approx(1.0)
    assert estimate_importances(config, directions, measured) == found
