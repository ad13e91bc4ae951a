"""Clients are served round-robin, in order per client, up to a limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import Overloaded
from molinkd.api.fair_queue import FairQueue


def test_a_busy_client_waits_for_its_own_items() -> None:
    queue: FairQueue[str] = FairQueue(10)
    for item in ("a1", "a2", "a3", "b1", "c1"):
        queue.add_item(item[0], item)
    assert [queue.pop_item() for _ in range(2)] == ["a1", "b1"]
    queue.add_item("b", "b2")
    assert [queue.pop_item() for _ in range(5)] == ["c1", "a2", "b2", "a3", None]


def test_the_queue_is_bounded() -> None:
    queue: FairQueue[int] = FairQueue(2)
    queue.add_item("a", 1)
    queue.add_item("b", 2)
    with pytest.raises(Overloaded):
        queue.add_item("c", 3)
    assert queue.pop_item() == 1
    queue.add_item("c", 3)
    assert len(queue) == 2


def test_a_full_queue_admits_a_client_with_fewer_items() -> None:
    queue: FairQueue[str] = FairQueue(4)
    for item in ("a1", "a2", "a3", "b1"):
        queue.add_item(item[0], item)
    assert queue.add_item("c", "c1") == "a3"
    with pytest.raises(Overloaded):
        queue.add_item("c", "c2")  # a has only one item more, so displacing one would gain nothing
    assert queue.add_item("d", "d1") == "a2"
    assert [queue.pop_item() for _ in range(5)] == ["a1", "b1", "c1", "d1", None]


def test_discarded_items_free_their_slot() -> None:
    queue: FairQueue[str] = FairQueue(2)
    queue.add_item("a", "a1")
    queue.add_item("b", "b1")
    queue.discard_item("a", "a1")
    queue.discard_item("a", "a1")
    queue.discard_item("b", "b0")
    assert queue.add_item("b", "b2") is None
    assert [queue.pop_item() for _ in range(3)] == ["b1", "b2", None]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_items_keep_their_order_and_none_is_lost(steps: list[tuple[str, bool]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(100)
    put: list[tuple[str, int]] = []
    taken: list[tuple[str, int]] = []
    for number, (owner, takes) in enumerate(steps):
        queue.add_item(owner, (owner, number))
        put.append((owner, number))
        if takes and (item := queue.pop_item()) is not None:
            taken.append(item)
    while (item := queue.pop_item()) is not None:
        taken.append(item)
    for owner in "abc":
        assert [i for i in taken if i[0] == owner] == [i for i in put if i[0] == owner]
