"""What relays observe of a PC's addresses, and the kind of router that follows from it."""

from molink.swarm.membership.router_kind import RouterObserver

OWN, PUBLIC = "192.168.1.2", "8.8.4.4"


def test_a_router_is_judged_by_most_observations() -> None:
    router = RouterObserver()
    assert router.kind == ""
    router.observe((OWN, 4000), (PUBLIC, 61234))
    assert router.kind == "symmetric"
    for port in (4001, 4002):
        router.observe((OWN, port), (PUBLIC, port))
    assert router.kind == "cone"
    for port in range(9):
        router.observe((PUBLIC, port), (PUBLIC, port))
    assert router.kind == "none"
