"""Banned peers in the status."""

import json

from molink.swarm.membership.banned_peers import BannedPeers
from tests.support.net import Net

STATUS = json.dumps({"peers": [{"id": "p", "name": "pc"}]}).encode()


def test_banned_peers_are_shown_until_removed() -> None:
    banned = BannedPeers()
    assert banned.add_to_status(STATUS) == STATUS
    banned.record_ban("this PC's control socket", "p", "may not send Form")
    banned.record_ban("this PC's control socket", "q", "x" * 999)
    first, second = json.loads(banned.add_to_status(STATUS))["banned_peers"]
    assert first == {
        "peer": "p",
        "name": "pc",
        "banned_by": "this PC's control socket",
        "reason": "may not send Form",
    }
    assert second["name"] == "q"
    banned.drop_peer("p")
    assert [one["peer"] for one in json.loads(banned.add_to_status(STATUS))["banned_peers"]] == [
        "q"
    ]


def test_number_of_banned_peers_is_bounded() -> None:
    banned = BannedPeers()
    for number in range(1000):
        banned.record_ban("w", str(number), "\x1b" * 999)
    assert len(banned.add_to_status(STATUS)) < 64 * 1024


async def test_server_reports_banned_peers(net: Net) -> None:
    """The server's callback matches :meth:`BannedPeers.record_ban`."""
    from functools import partial

    from molink.facts.identity import derive_peer_id
    from molink.wire.messages.admin import StatusRequest
    from molink.wire.messages.codec import control_codec

    banned, keys = BannedPeers(), net.member()
    server = net.server(
        control_codec(),
        lambda *_: None,
        permits=lambda *_: False,
        on_blocked=partial(banned.record_ban, "here"),
    )
    client = net.client(control_codec(), keys, server.port)
    await client.wait_connected(60)
    for ref in range(40):
        client.send(StatusRequest(ref=ref))
    await net.until(lambda: banned.add_to_status(STATUS) != STATUS)
    (shown,) = json.loads(banned.add_to_status(STATUS))["banned_peers"]
    assert (shown["peer"], shown["banned_by"]) == (derive_peer_id(keys.public), "here")
