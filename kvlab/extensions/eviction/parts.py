"""What eviction adds to kvlab."""

from kvlab.own_extensions import Parts

_FOLDER = "kvlab.extensions.eviction"

PARTS = Parts(
    fields={"serving": f"{_FOLDER}.config:EvictFields"},
    members={
        "cache_reports": {"eviction": f"{_FOLDER}.report:report_eviction"},
        "checked_servings": {"evict": f"{_FOLDER}.config:CHECKED"},
        "fixed_budgets": {"evict": f"{_FOLDER}.slots:fix_budget"},
        "serving_problems": {"evict": f"{_FOLDER}.slots:find_problems"},
        "slot_plans": {"evict": f"{_FOLDER}.slots:plan_slot"},
    },
    measurement_code=tuple(f"{_FOLDER}.{name}" for name in ("config", "slots", "buffers")),
)
