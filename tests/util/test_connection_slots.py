"""Slots of connections that have not authenticated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.util.connection_slots import ConnectionSlots, find_network


def test_an_address_at_its_bound_replaces_its_own_oldest() -> None:
    slots = ConnectionSlots[int](4, 2)
    assert [slots.admit(n, "10.0.0.1") for n in range(4)] == [None, None, 0, 1]
    assert slots.admit(9, "10.0.0.2") is None
    assert len(slots) == 3


def test_a_full_table_replaces_one_of_the_address_with_the_most() -> None:
    slots = ConnectionSlots[str](3, 3)
    for one in "abc":
        slots.admit(one, "10.0.0.1")
    assert slots.admit("x", "10.0.0.2") == "a"
    assert slots.admit("d", "10.0.0.1") == "b"
    slots.release("x")
    slots.release("x")
    slots.release("b")
    assert len(slots) == 2


def test_with_one_connection_each_the_oldest_is_replaced() -> None:
    slots = ConnectionSlots[int](3, 2)
    assert [slots.admit(n, f"10.0.0.{n}") for n in range(5)] == [None, None, None, 0, 1]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8:0:0:ffff::2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("a", "b", False),
    ],
)
def test_an_ipv6_network_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (find_network(one) == find_network(other)) is same


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.sampled_from("abc"))))
def test_bounds_hold(steps: list[tuple[bool, int, str]]) -> None:
    slots, held = ConnectionSlots[int](5, 3), set[int]()
    for adds, connection, address in steps:
        if adds and connection not in held:
            held.add(connection)
            replaced = slots.admit(connection, address)
            assert replaced != connection
            held.discard(-1 if replaced is None else replaced)
        elif not adds:
            slots.release(connection)
            held.discard(connection)
        slots.validate()
        assert len(slots) == len(held)
