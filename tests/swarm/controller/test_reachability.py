import msgspec

from molink.swarm.controller.reachability import (
    Reachability,
    UnreachablePeer,
    describe_firewall_fix,
)
from tests.support.fake_fleet import Kit


def test_unreachable_peer_is_excluded() -> None:
    reach = Reachability()
    assert reach.find_unreachable("abc") == {}
    reach.record_attempt("a", "b", ok=False)
    reach.record_attempt("b", "c", ok=False)
    assert reach.find_unreachable("ab") == {"b": UnreachablePeer("b", "a", "b")}
    assert reach.find_unreachable("ba") == {"a": UnreachablePeer("a", "a", "b")}
    reach.record_attempt("a", "b", ok=True)
    assert reach.find_unreachable("bc") == {"c": UnreachablePeer("c", "b", "c")}
    reach.drop_peer("b")
    assert reach.find_unreachable("abc") == {}


def test_results_are_cached() -> None:
    """When a swarm starts, each peer reports that it has reached all others."""
    reach = Reachability()
    reach.record_attempt("a", "b", ok=False)
    found = reach.find_unreachable("ab")
    reach.record_attempt("b", "a", ok=True)
    reach.record_attempt("a", "b", ok=False)
    assert reach.find_unreachable("ab") is found
    reach.record_attempt("a", "b", ok=True)
    assert reach.find_unreachable("ab") == {}


def test_ring_avoids_unconnectable_pairs() -> None:
    reach = Reachability()
    reach.record_attempt("b", "c", ok=False)
    assert reach.find_unreachable("abc") == {}  # a, c, b
    reach.record_attempt("c", "b", ok=False)
    assert reach.find_unreachable("abc") == {"c": UnreachablePeer("c", "b", "c")}
    assert reach.find_unreachable("abcd") == {}
    assert reach.unreachable_from("c") == {"b"}
    # All peers must connect to the first stage, which receives requests.
    for one in "abd":
        reach.record_attempt("c", one, ok=False)
    assert reach.find_unreachable("abdc") == {"c": UnreachablePeer("c", "c", "a")}


def test_order_search_is_bounded() -> None:
    reach = Reachability()
    names = [f"p{i}" for i in range(20)]
    for one in names[:-1]:
        reach.record_attempt(one, names[-1], ok=False)
    for i in range(0, 19, 2):
        reach.record_attempt(names[i], names[i + 1], ok=False)
    assert reach.find_unreachable(names).keys() == {names[-1]}


def test_firewall_commands(kit: Kit) -> None:
    report = kit.report("a")
    linux = msgspec.structs.replace(report, platform="linux", worker_ports=(5468, 5479))
    assert describe_firewall_fix(linux) == (
        "sudo ufw allow 5467/tcp && sudo ufw allow 5468:5479/tcp (or: sudo firewall-cmd "
        "--add-port=5467/tcp --add-port=5468-5479/tcp)"
    )
    windows = msgspec.structs.replace(linux, platform="win32")
    assert "-LocalPort 5467,5468-5479 -Action Allow" in describe_firewall_fix(windows)
    assert "5467,5468 " in describe_firewall_fix(
        msgspec.structs.replace(windows, worker_ports=(5468, 5468))
    )
    assert "-LocalPort 5467 " in describe_firewall_fix(
        msgspec.structs.replace(windows, worker_ports=(0, 0))
    )
