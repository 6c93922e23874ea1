"""`training.int8`: which products of linear layers are in int8. No torch."""

from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import AfterValidator

from kvlab.spec import spec_model as spec

if TYPE_CHECKING:
    from kvlab.spec.training_config import TrainingConfig

Int8Product = Literal["output", "grad_input", "grad_weight"]
INT8_PRODUCTS: tuple[Int8Product, ...] = get_args(Int8Product)
"""The matrix products of a linear layer that trains."""


def _order_products(value: tuple[Int8Product, ...]) -> tuple[Int8Product, ...]:
    return tuple(name for name in INT8_PRODUCTS if name in value)


class Int8Fields(spec.SpecModel):
    """What `training` gets."""

    omitted_defaults = frozenset({"int8"})

    int8: Annotated[
        spec.TupleOf[Int8Product], spec.once("a product"), AfterValidator(_order_products)
    ] = ()
    """Products of the linear layers of attention and MLPs that are in int8, with a scale for each
    row and column that is found anew in each pass; embeddings and head are left out. [output,
    grad_input] is SwitchBack (arXiv 2304.13013).
    Example: [output, grad_input, grad_weight]"""


def find_input_bytes(training: "TrainingConfig", item_bytes: int) -> int:
    """Return the bytes of each number that a linear layer keeps for the gradient of its weight."""
    return 1 if "grad_weight" in Int8Fields.of(training).int8 else item_bytes
