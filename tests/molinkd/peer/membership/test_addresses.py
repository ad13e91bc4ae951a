"""Addresses that a PC advertises."""

from molinkd.peer.membership.addresses import (
    advertised_addresses,
    is_loopback,
    is_wildcard,
    rank_addresses,
)


def test_ranking() -> None:
    found = ["127.0.0.1", "169.254.3.4", "172.17.0.1", "192.168.1.5"]
    assert rank_addresses(found, "192.168.1.5") == ("192.168.1.5", "172.17.0.1")
    found = ["fd00::2", "fe80::1", "::1", "172.17.0.1", "2001:4860::7", "192.168.1.5"]
    public = ("192.168.1.5", "2001:4860::7", "fd00::2", "172.17.0.1")
    assert rank_addresses(found, "192.168.1.5") == public
    assert rank_addresses(["127.0.0.1"], None) == ("127.0.0.1",)
    assert len(rank_addresses([f"10.0.0.{n}" for n in range(20)], None)) == 8


def test_a_bound_address_is_advertised() -> None:
    assert advertised_addresses("127.0.0.1") == ("127.0.0.1",)
    assert advertised_addresses("0.0.0.0", ("pc.example",)) == ("pc.example",)
    assert advertised_addresses("0.0.0.0")


def test_kinds_of_hosts() -> None:
    assert is_loopback("127.0.0.2")
    assert is_loopback("localhost")
    assert not is_loopback("192.168.1.5")
    assert not is_loopback("pc.example")
    assert is_wildcard("0.0.0.0")
