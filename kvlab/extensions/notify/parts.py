"""What notification adds to kvlab: what a submit does at its end."""

from kvlab.own_extensions import Parts

PARTS = Parts(members={"publishers": {"notify": ".publisher:NotifyPublisher"}})
