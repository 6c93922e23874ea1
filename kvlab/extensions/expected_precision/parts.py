"""What the expected precision adds to kvlab: lines of `kvlab plan`."""

from kvlab.own_extensions import Parts

PARTS = Parts(members={"plan_outlooks": {"precision": ".outlook:describe_precision"}})
