import msgspec

from molink.swarm.controller.reach import Reach, Unreachable, how_to_open
from tests.support.swarm import Kit


def test_who_cannot_be_reached_by_those_before_it_is_left_out() -> None:
    reach = Reach()
    assert reach.left_out("abc") == {}
    reach.tried("a", "b", ok=False)
    reach.tried("b", "c", ok=False)
    assert reach.left_out("ab") == {"b": Unreachable("b", "a", "b")}
    assert reach.left_out("ba") == {"a": Unreachable("a", "a", "b")}
    reach.tried("a", "b", ok=True)
    assert reach.left_out("bc") == {"c": Unreachable("c", "b", "c")}
    reach.forget("b")
    assert reach.left_out("abc") == {}


def test_what_was_known_is_not_thought_through_again() -> None:
    """When a swarm starts, each peer tells of all others that it has reached them."""
    reach = Reach()
    reach.tried("a", "b", ok=False)
    found = reach.left_out("ab")
    reach.tried("b", "a", ok=True)
    reach.tried("a", "b", ok=False)
    assert reach.left_out("ab") is found
    reach.tried("a", "b", ok=True)
    assert reach.left_out("ab") == {}


def test_a_ring_goes_round_pairs_that_cannot_connect() -> None:
    reach = Reach()
    reach.tried("b", "c", ok=False)
    assert reach.left_out("abc") == {}  # a, c, b
    reach.tried("c", "b", ok=False)
    assert reach.left_out("abc") == {"c": Unreachable("c", "b", "c")}
    assert reach.left_out("abcd") == {}
    assert reach.blocked("c") == {"b"}
    # All have to connect to the first stage, where requests go.
    for one in "abd":
        reach.tried("c", one, ok=False)
    assert reach.left_out("abdc") == {"c": Unreachable("c", "c", "a")}


def test_the_search_for_an_order_ends() -> None:
    reach = Reach()
    names = [f"p{i}" for i in range(20)]
    for one in names[:-1]:
        reach.tried(one, names[-1], ok=False)
    for i in range(0, 19, 2):
        reach.tried(names[i], names[i + 1], ok=False)
    assert reach.left_out(names).keys() == {names[-1]}


def test_the_command_that_opens_the_ports(kit: Kit) -> None:
    report = kit.report("a")
    linux = msgspec.structs.replace(report, system="linux", worker_ports=(5468, 5479))
    assert how_to_open(linux) == (
        "sudo ufw allow 5467/tcp && sudo ufw allow 5468:5479/tcp (or: sudo firewall-cmd "
        "--add-port=5467/tcp --add-port=5468-5479/tcp)"
    )
    windows = msgspec.structs.replace(linux, system="win32")
    assert "-LocalPort 5467,5468-5479 -Action Allow" in how_to_open(windows)
    assert "5467,5468 " in how_to_open(msgspec.structs.replace(windows, worker_ports=(5468, 5468)))
    assert "-LocalPort 5467 " in how_to_open(msgspec.structs.replace(windows, worker_ports=(0, 0)))
