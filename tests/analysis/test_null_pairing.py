"""The arrays of the study of pairing hold what reports compute, sweep by sweep."""

import numpy as np
import pytest

from kvlab.analysis.standard_errors import _residual_variances, pool_errors
from tests.studies.null_pairing import find_errors_of_trainings, one_factor


@pytest.mark.parametrize("base_seeds", [5, 12])
def test_simulated_errors_with_more_seeds_of_the_baseline_are_those_of_reports(base_seeds):
    _, weights = one_factor(8)
    random = np.random.default_rng(base_seeds)
    counts = np.array([base_seeds, *[4] * 8])
    values = [random.normal(size=count) for count in counts]
    rows = {c: dict(enumerate(one.tolist())) for c, one in enumerate(values)}
    differences = [{s: rows[c][s] - rows[0][s] for s in range(4)} for c in range(1, 9)]
    named = [{c: 1.0, 0: -1.0} for c in range(1, 9)]
    errors = pool_errors(differences, named, rows, all_seeds=True)
    means = [one.mean() for one in values]
    noise = np.array(list(_residual_variances(list(rows.values()))))[None]
    variances = np.array([[one.var(ddof=1) for one in values]])
    expected, df = find_errors_of_trainings(variances, counts, weights, noise)
    for number, (one, error) in enumerate(zip(differences, errors, strict=True), start=1):
        assert not error.is_paired
        value = sum(one.values()) / 4 + error.shift
        assert value == pytest.approx(means[number] - means[0])
        assert error.value**2 == pytest.approx(expected[0, number - 1])
        assert error.df == pytest.approx(np.broadcast_to(df, expected.shape)[0, number - 1])
