"""ZeroMQ endpoints of hosts and ports."""

from molink.wire.sockets.create_socket import endpoints


def test_ipv6_addresses_are_bracketed() -> None:
    expected = ("tcp://10.0.0.1:5467", "tcp://[fe80::1]:5467", "tcp://pc.lan:5467")
    assert endpoints(("10.0.0.1", "fe80::1", "pc.lan"), 5467) == expected
