"""Errors over texts: against simulations of known variance."""

import numpy as np
import pytest
import statsmodels.api as sm

from kvlab.analysis.study import Study
from kvlab.extensions.findings.text_error import estimate_text_error, text_error
from tests.support.record_factory import Record

DOCUMENTS, TOKENS = 200, 50


class Scored(Record):
    """heads=mqa differs by seed, by document, and by both, with the given deviations."""

    by_seed, by_document, by_both = 0.01, 0.0, 0.0

    def details(self, levels, seed):
        columns = self.columns(levels, seed)
        return {**super().details(levels, seed), "texts": {"loss": columns, "served": columns}}

    def columns(self, levels, seed):
        nats = np.full(DOCUMENTS, 4.0)
        if levels["heads"] == "mqa":
            nats = nats + 0.1 + np.random.default_rng(seed).normal(0, self.by_seed)
            nats = nats + np.random.default_rng(99).normal(0, self.by_document, DOCUMENTS)
            nats = nats + np.random.default_rng(7 + seed).normal(0, self.by_both, DOCUMENTS)
        numbers = {"documents": [*range(DOCUMENTS)], "tokens": [TOKENS] * DOCUMENTS}
        return {**numbers, "nats": (TOKENS * nats).tolist()}

    def loss(self, levels, seed):
        return float(np.mean(self.columns(levels, seed)["nats"])) / TOKENS


def estimate(record, folder):
    study = Study.load(record.write(folder), "made")
    effect = study.effects("loss_served")[0]
    return estimate_text_error(study, "loss_served", effect.weights, effect.seeds)


def test_the_error_over_texts_is_that_of_documents_not_of_seeds(tmp_path):
    record = Scored(factors={"heads": ("mha", "mqa")}, seeds=tuple(range(8)))
    record.by_document = 0.01
    assert estimate(record, tmp_path) == pytest.approx(0.01 / DOCUMENTS**0.5, rel=0.2)


@pytest.mark.parametrize("column", ["documents", "tokens"])
def test_losses_of_other_text_are_not_paired(tmp_path, column):
    class Moved(Scored):
        def columns(self, levels, seed):
            found = super().columns(levels, seed)
            is_moved = levels["heads"] == "mqa" and seed == 2
            return {**found, column: [n + is_moved for n in found[column]]}

    assert estimate(Moved(factors={"heads": ("mha", "mqa")}), tmp_path) is None


def test_the_error_over_texts_is_the_cluster_robust_one():
    rng = np.random.default_rng(0)
    tokens, effects = rng.integers(1, 60, 40), rng.normal(0, 0.5, 40)
    by_token = [rng.normal(effect, 1, count) for effect, count in zip(effects, tokens, strict=True)]
    error = text_error(tokens.astype(float), np.array([part.sum() for part in by_token]))
    values = np.concatenate(by_token)
    clusters = {"groups": np.repeat(np.arange(40), tokens), "df_correction": True}
    ones = np.ones(len(values))
    model = sm.OLS(values, ones).fit(cov_type="cluster", cov_kwds=clusters)
    assert error == pytest.approx(model.bse[0])
    assert text_error(np.array([5.0]), np.array([10.0])) is None, "one document"
