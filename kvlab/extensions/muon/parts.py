"""What Muon adds to kvlab."""

from kvlab.own_extensions import Parts

PARTS = Parts(members={"optimizers": {"muon": ".entry:MUON"}}, training_code=(".muon",))
