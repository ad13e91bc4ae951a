"""Parsing announcements of strangers on the local network."""

import pytest
from hypothesis import given
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


@given(
    st.dictionaries(
        st.sampled_from([b"v", b"swarm", b"name", b"key", b"x"]),
        st.one_of(st.none(), st.binary(max_size=300), st.just(b"1"), st.just(KEY.encode())),
    ),
    st.lists(st.text(max_size=20)),
    st.one_of(st.none(), st.integers()),
)
def test_parsing_never_fails(
    properties: dict[bytes, bytes | None], addresses: list[str], port: int | None
) -> None:
    parse_announcement(properties, addresses, port)
