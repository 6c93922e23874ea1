"""The arrays of the study of pairing hold what reports compute, sweep by sweep."""

import numpy as np
import pytest

from kvlab.analysis.standard_errors import pool_errors
from tests.studies.null_pairing import DESIGNS, NOISES, find_errors


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("common", [0.0, 1.0])
def test_simulated_errors_are_those_of_reports(design, common):
    levels, weights = DESIGNS[design]
    named = [{c: float(w) for c, w in enumerate(row) if w} for row in weights]
    for seeds in (2, 3, 5):
        random = np.random.default_rng(seeds)
        values = NOISES["baseline 3 times"](random, levels, (10, len(levels), seeds))
        values = values + common * random.normal(size=(10, 1, seeds))
        variances, degrees = find_errors(values, weights)
        for table, variance, df in zip(values, variances, degrees, strict=True):
            rows = {c: dict(enumerate(row)) for c, row in enumerate(table.tolist())}
            differences = [dict(enumerate((row @ table).tolist())) for row in weights]
            errors = pool_errors(differences, named, rows)
            assert [one.value**2 for one in errors] == pytest.approx(variance)
            assert [one.df for one in errors] == pytest.approx(df)
