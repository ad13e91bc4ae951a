"""Parsing of strangers' announcements on the local network."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from molink.swarm.membership.discovery import (
    DiscoveredSwarm,
    instance_name,
    is_dialable,
    parse_announcement,
)

KEY = "k" * 40
SWARM = DiscoveredSwarm("ab" * 8, "attic", KEY, ("192.168.1.7",), 5479)


def announced(nearby: DiscoveredSwarm, **changes: str) -> dict[bytes, bytes | None]:
    return {k.encode(): v.encode() for k, v in (nearby.properties | changes).items()}


def test_announcement_round_trips() -> None:
    assert parse_announcement(announced(SWARM), SWARM.addresses, SWARM.port) == SWARM
    assert instance_name(SWARM.swarm) == f"molink-{SWARM.swarm}._molink._tcp.local."


def test_announced_name_is_sanitized() -> None:
    hostile = "\x1b]0;attic\x07\nmolink: \u202edone" + "x" * 100
    found = parse_announcement(announced(SWARM, name=hostile), SWARM.addresses, 5479)
    assert found is not None
    assert found.name.isprintable()
    assert len(found.name) <= 64
    nameless = parse_announcement(announced(SWARM, name="\n"), SWARM.addresses, 5479)
    assert nameless is not None
    assert nameless.name == SWARM.swarm


@pytest.mark.parametrize(
    "changes",
    [{"v": "2"}, {"swarm": "../x"}, {"swarm": ""}, {"key": "k"}, {"key": "\n" * 40}],
)
def test_invalid_announcement_is_ignored(changes: dict[str, str]) -> None:
    assert parse_announcement(announced(SWARM, **changes), SWARM.addresses, 5479) is None


def test_unusable_addresses_are_ignored() -> None:
    """For example loopback and broadcast addresses."""
    for address in ("127.0.0.1", "::1", "224.0.0.1", "0.0.0.0", "attic", "", "255.255.255.255"):
        assert not is_dialable(address)
        assert parse_announcement(announced(SWARM), [address], 5479) is None
    for port in (0, 65536, None, -1):
        assert parse_announcement(announced(SWARM), SWARM.addresses, port) is None
    many = parse_announcement(announced(SWARM), [f"10.0.0.{n}" for n in range(1, 99)], 5479)
    assert many is not None
    assert len(many.addresses) == 6


def valid_or_any(valid: bytes) -> st.SearchStrategy[bytes | None]:
    return st.one_of(st.just(valid), st.just(valid), st.none(), st.binary(max_size=300))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            b"v": valid_or_any(b"1"),
            b"swarm": valid_or_any(SWARM.swarm.encode()),
            b"name": st.binary(max_size=300),
            b"key": valid_or_any(KEY.encode()),
            b"x": st.binary(max_size=300),
        },
    ),
    st.lists(st.one_of(st.sampled_from(["10.0.0.1", "192.168.1.7"]), st.text(max_size=20))),
    st.one_of(st.sampled_from([0, 1, 5479, 65535, 65536]), st.none(), st.integers()),
)
@example(announced(SWARM, name="\x1b"), ["10.0.0.1"], 5479)
@example(announced(SWARM), ["10.0.0.1"], 65536)
@example(announced(SWARM, key="k"), ["10.0.0.1"], 5479)
def test_any_announcement_is_ignored_or_valid(
    properties: dict[bytes, bytes | None], addresses: list[str], port: int | None
) -> None:
    found = parse_announcement(properties, addresses, port)
    if found is None:
        return
    assert properties[b"v"] == b"1"
    assert found.swarm.encode() == properties[b"swarm"]
    assert re.fullmatch("[0-9a-f]{16}", found.swarm)
    assert found.public_key.encode() == properties[b"key"]
    assert len(found.public_key) == 40
    assert found.name.isprintable()
    assert 0 < len(found.name) <= 64
    assert set(found.addresses) <= set(addresses)
    assert found.addresses
    assert all(map(is_dialable, found.addresses))
    assert found.port == port
    assert 0 < found.port < 65536
    assert parse_announcement(announced(found), found.addresses, found.port) == found
