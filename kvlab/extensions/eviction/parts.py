"""What eviction adds to kvlab."""

from kvlab.own_extensions import Parts

PARTS = Parts(
    fields={"serving": ".config:EvictFields"},
    members={
        "cache_reports": {"eviction": ".report:report_eviction"},
        "checked_servings": {"evict": ".config:CHECKED"},
        "file_members": {"eviction_policies": ".policies:EvictionPolicy"},
        "fixed_budgets": {"evict": ".slots:fix_budget"},
        "serving_problems": {"evict": ".slots:find_problems"},
        "slot_plans": {"evict": ".slots:plan_slot"},
    },
    measurement_code=(".config", ".slots", ".buffers", ".policies"),
)
