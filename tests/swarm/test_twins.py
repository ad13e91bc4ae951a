"""Two PCs with one key, told by whose connection is heard again."""

from itertools import cycle, islice

from hypothesis import given
from hypothesis import strategies as st

from molink.swarm.twins import RETURNS, Twins


def test_one_pc_that_comes_back_has_no_twin() -> None:
    twins = Twins()
    for connection in (b"a", b"a", b"b", b"a", b"b", b"b", b"c", b"b", b"c", b"d"):
        assert not twins.heard("p", connection), "what was under way is heard late, once"


def test_the_one_that_came_second_is_shut_out() -> None:
    twins = Twins()
    heard = [(one, twins.heard("p", one)) for one in islice(cycle([b"a", b"b"]), 20)]
    assert not any(shut for one, shut in heard if one == b"a")
    shut = [shut for one, shut in heard if one == b"b"]
    assert shut == sorted(shut)
    assert shut.count(False) <= RETURNS
    assert not twins.heard("another", b"b")
    # The first one is free to come by a new connection, and once it has gone so is the other.
    assert not twins.heard("p", b"c")
    assert twins.heard("p", b"b")
    twins.forget("p")
    assert not twins.heard("p", b"b")


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=60))
def test_somebody_is_always_heard(connections: list[bytes]) -> None:
    twins = Twins()
    shut = {one for one in connections if twins.heard("p", one)}
    assert len(shut) <= max(0, len(set(connections)) - 1)
