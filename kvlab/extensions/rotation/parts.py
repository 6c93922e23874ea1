"""What rotation adds to kvlab."""

from kvlab.own_extensions import Parts

PARTS = Parts(members={"rotations": {"hadamard": ".hadamard"}}, measurement_code=(".hadamard",))
