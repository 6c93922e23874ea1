"""What rotation adds to kvlab."""

from kvlab.own_extensions import Parts

HADAMARD = "kvlab.extensions.rotation.hadamard"

PARTS = Parts(members={"rotations": {"hadamard": HADAMARD}}, measurement_code=(HADAMARD,))
