"""What stochastic routing adds to kvlab."""

from kvlab.own_extensions import Parts

PARTS = Parts(
    fields={"training": ".routing:RoutingFields"},
    problems=".routing:find_problems",
    members={"step_reads": {"kv_routing": ".routing:draw_reads"}},
    training_code=(".routing", ".routed_pass"),
)
