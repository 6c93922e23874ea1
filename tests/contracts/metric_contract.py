"""The contract of metrics: what the record, MLflow and the report rely on, whatever the metric."""

import json
import re
from typing import get_args, get_type_hints

from kvlab.store.metrics import METRICS, Metric, collect_metrics


class MetricContract:
    """Holds for one entry of `METRICS`; give its ``name`` by a fixture."""

    def test_name_title_direction_and_value(self, name):
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert len(name) <= 250, "MLflow's longest metric name"
        metric = METRICS[name]
        assert metric.title.strip() == metric.title != ""
        assert metric.better in get_args(get_type_hints(Metric)["better"])
        titles = [other.title for other in METRICS.values()]
        assert titles.count(metric.title) == 1, "tables tell metrics apart by their titles"
        result = json.loads(json.dumps({"measurements": {name: 0.5}}))
        assert collect_metrics(result)[name] == 0.5
        assert name not in collect_metrics({"measurements": None})
