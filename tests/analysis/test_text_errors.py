"""Errors over texts, against statsmodels and against simulation."""

import numpy as np
import pytest
import statsmodels.api as sm

from kvlab.analysis.text_errors import estimate_over_texts


def draw_texts(rng, documents=40):
    tokens = rng.integers(1, 60, documents)
    effects = rng.normal(0, 0.5, documents)
    by_token = [rng.normal(effect, 1, count) for effect, count in zip(effects, tokens, strict=True)]
    return tokens.astype(float), by_token


def test_the_error_is_the_cluster_robust_one():
    tokens, by_token = draw_texts(np.random.default_rng(0))
    estimate = estimate_over_texts(tokens, np.array([part.sum() for part in by_token]))
    values = np.concatenate(by_token)
    groups = np.repeat(np.arange(40), tokens.astype(int))
    model = sm.OLS(values, np.ones(len(values))).fit(
        cov_type="cluster", cov_kwds={"groups": groups, "df_correction": True}
    )
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.error == pytest.approx(model.bse[0])
    assert (estimate.documents, estimate.tokens) == (40, len(values))


def test_the_error_is_the_spread_over_draws_of_texts():
    rng = np.random.default_rng(1)
    estimates = []
    for _ in range(2000):
        tokens, by_token = draw_texts(rng)
        sums = np.array([part.sum() for part in by_token])
        estimates.append(estimate_over_texts(tokens, sums))
    spread = np.std([estimate.value for estimate in estimates])
    assert np.mean([estimate.error for estimate in estimates]) == pytest.approx(spread, rel=0.06)


def test_one_document_has_no_error():
    assert estimate_over_texts(np.array([5.0]), np.array([10.0])).error is None
