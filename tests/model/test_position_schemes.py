"""The position schemes of `model.position`: the contract, and a new member."""

from kvlab.spec.layer_config import POSITIONS
from tests.contracts.position_scheme_contract import PositionSchemeContract


class TestLearned(PositionSchemeContract):
    name = "learned"


class TestRope(PositionSchemeContract):
    name = "rope"


class TestNone(PositionSchemeContract):
    name = "none"
    sees_order = False


def test_every_scheme_of_the_table_has_a_contract_test():
    assert {test.name for test in PositionSchemeContract.__subclasses__()} == set(POSITIONS)
