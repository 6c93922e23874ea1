"""What stochastic routing adds to kvlab."""

from kvlab.own_extensions import Parts

_FOLDER = "kvlab.extensions.kv_routing"

PARTS = Parts(
    fields={"training": f"{_FOLDER}.routing:RoutingFields"},
    problems=f"{_FOLDER}.routing:find_problems",
    members={"step_reads": {"kv_routing": f"{_FOLDER}.routing:draw_reads"}},
    training_code=(f"{_FOLDER}.routing", f"{_FOLDER}.routed_pass"),
)
