"""Invitations and the rate of joins by them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import NotAuthorized, RequestError, TokenError, UsageError
from molink.swarm.controller.records import InvitationRecord, InvitationUse
from molink.swarm.membership.invitations import (
    MAX_INVITATIONS,
    JoinRateLimiter,
    check_lifetime,
    check_use,
    encode_invitations,
    find_excess,
    sign_invitation,
)
from molink.util.token_bucket import RateLimit
from molink.wire.messages.membership import InvitationEntry, SignedEntry
from molink.wire.sockets.key_pair import KeyPair
from tests.support.membership import LogBuilder, TestPeer

DAY = 86400
KEYS = KeyPair.generate()
RECORD = InvitationRecord("invite:1", KEYS.public, 111, "a", 1.0, 2)


def invite(ttl: float, uses: int = 1, now: float = 100.5) -> SignedEntry:
    return sign_invitation("s", KEYS.signer, KeyPair.generate().signer, ttl, uses, now)


def entry_of(signed: SignedEntry) -> InvitationEntry:
    entry = signed.decode()
    assert isinstance(entry, InvitationEntry)
    return entry


def test_an_invitation_says_how_long_and_for_how_many() -> None:
    entry = entry_of(invite(10, uses=3))
    assert (entry.created_at, entry.expires_at, entry.max_uses) == (100.5, 111, 3)
    assert entry_of(invite(0)).expires_at == 0, "forever"


@pytest.mark.parametrize("uses", [0, -1, 256])
def test_invalid_number_of_uses_is_rejected(uses: int) -> None:
    with pytest.raises(UsageError, match="for 1 to 255 PCs"):
        invite(1, uses)


@pytest.mark.parametrize("ttl", [-1, float("nan"), float("inf"), 1e18])
def test_invalid_duration_is_rejected(ttl: float) -> None:
    with pytest.raises(UsageError, match="can't be valid for"):
        invite(ttl)


@pytest.mark.parametrize("ttl", [0, 31 * DAY])
def test_only_owners_invitations_never_expire(ttl: int) -> None:
    entry = entry_of(invite(ttl, now=0))
    with pytest.raises(NotAuthorized, match="more than 30 days"):
        check_lifetime(entry, 0.0, owner=False)
    check_lifetime(entry, 0.0, owner=True)
    check_lifetime(entry_of(invite(DAY, now=0)), 0.0, owner=False)
    with pytest.raises(RequestError, match="expired"):
        check_lifetime(entry_of(invite(DAY, now=0)), DAY, owner=True)


def test_an_invitation_may_be_used_until_it_expires_or_is_used_up() -> None:
    check_use(RECORD, "b", 110.9)
    for record in (RECORD, None):
        with pytest.raises(TokenError, match="expired"):
            check_use(record, "b", 111.0)
    used = replace(RECORD, used_by=(InvitationUse("b", 2), InvitationUse("c", 3)))
    with pytest.raises(TokenError, match="was for 2 PCs, which have joined"):
        check_use(used, "d", 5.0)
    check_use(used, "b", 5.0)  # joining again counts once
    with pytest.raises(TokenError, match="was for 1 PC, which has joined"):
        check_use(replace(used, max_uses=1, used_by=used.used_by[:1]), "c", 5.0)


def test_invitations_are_listed() -> None:
    record = replace(RECORD, used_by=(InvitationUse("b", 2),))
    (shown,) = json.loads(encode_invitations([record], str.upper))
    assert shown == {
        "id": "1",
        "created": 1.0,
        "expires": 111,
        "uses": 2,
        "left": 1,
        "creator": {"peer": "a", "name": "A"},
        "used": [{"peer": "b", "name": "B", "at": 2}],
    }
    text = encode_invitations([record] * 5000, str.upper)
    assert 0 < len(json.loads(text)) < 5000
    assert len(text) < 200_000


def test_only_the_creators_own_oldest_unused_invitations_are_too_many() -> None:
    built, a, joined = LogBuilder(), TestPeer(), TestPeer()
    built.admit(built.founder, a)
    built.invite(built.founder)
    _, first = built.invite(a)
    used, _ = built.invite(a)
    built.join(used, joined)
    built.invite(a, expires_at=5)
    for _ in range(MAX_INVITATIONS - 2):
        built.invite(a)
    assert find_excess(built.log, a.peer, 10.0) == []
    built.invite(a)
    assert [one.hash for one in find_excess(built.log, a.peer, 10.0)] == [first.hash]
    assert find_excess(built.log, built.founder.peer, 10.0) == []


def test_burst_then_steady_rate() -> None:
    rate = JoinRateLimiter(100.0, RateLimit(2, 0.5), RateLimit(99, 99.0))
    assert [rate.admit_join("a", 100.0) for _ in range(4)] == [0.0, 0.0, 2.0, 2.0]
    assert rate.admit_join("a", 101.0) == 1.0
    assert rate.admit_join("a", 102.0) == 0.0
    assert rate.admit_join("b", 102.0) == 0.0, "each invitation has its own bucket"
    assert [rate.admit_join("a", 999.0) for _ in range(3)] == [0.0, 0.0, 2.0], (
        "no more than a burst"
    )
    rate.drop_invitation("a")
    assert rate.admit_join("a", 999.0) == 0.0
    rate.drop_invitation("never seen")


def test_overall_rate_is_bounded() -> None:
    rate = JoinRateLimiter(0.0, RateLimit(2, 1.0), RateLimit(3, 1.0))
    assert [rate.admit_join(id, 0.0) for id in "aabbc"] == [0.0, 0.0, 0.0, 1.0, 1.0]
    # Rejected joins take no tokens.
    assert rate.admit_join("b", 1.0) == 0.0


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-1.0, 3.0)), max_size=60))
def test_joins_never_exceed_burst_and_rate(events: list[tuple[str, float]]) -> None:
    now, admitted = 0.0, 0
    rate = JoinRateLimiter(now, RateLimit(3, 1.0), RateLimit(4, 1.5))
    latest = 0.0
    for invitation, passed in events:
        now += passed  # a clock that goes back adds no tokens
        latest = max(latest, now)
        wait = rate.admit_join(invitation, now)
        assert wait >= 0.0
        admitted += wait == 0.0
        assert admitted <= 4 + 1.5 * latest + 1e-6
