"""Searches: Optuna's suggestions become trials, and their results the history of the search."""
