"""Invitations and the rate of joins by them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import NotAuthorized, TokenError, UsageError
from molink.swarm.controller.records import InvitationUse
from molink.swarm.membership.invitations import (
    MAX_INVITATIONS,
    Invitations,
    JoinRateLimiter,
    encode_invitations,
)
from molink.util.token_bucket import RateLimit

DAY = 86400
KEY = "k" * 40


def test_invitation_is_valid_until_it_expires() -> None:
    invitations = Invitations()
    record = invitations.create_invitation("a", KEY, 10, now=100.5, owner=True)
    forever = invitations.create_invitation("a", KEY, 0, now=100.5, owner=True)
    assert (record.public_key, record.creator) == (KEY, "a")
    assert (record.expires_at, forever.expires_at) == (111, 0)
    assert invitations.redeem_invitation(record.id, "b", now=110.9)
    for id, now in ((record.id, 111), ("invite:other", 0)):
        with pytest.raises(TokenError, match="expired"):
            invitations.redeem_invitation(id, "b", now=now)
    assert invitations.purge_expired(now=110) == []
    assert invitations.purge_expired(now=111) == [record.id]
    assert [one.id for one in invitations] == [forever.id]
    assert invitations.revoke_invitation(forever.id)
    assert not invitations.revoke_invitation(forever.id)


def test_number_of_uses_is_enforced() -> None:
    invitations = Invitations()
    id = invitations.create_invitation("a", KEY, 0, now=1, owner=True, uses=2).id
    assert invitations.redeem_invitation(id, "b", now=2).used_by == (InvitationUse("b", 2),)
    assert invitations.redeem_invitation(id, "c", now=2).used_by == (InvitationUse("c", 2),), (
        "nothing was kept yet"
    )
    invitations.put_record(invitations.redeem_invitation(id, "b", now=2))
    again = invitations.redeem_invitation(id, "b", now=3)
    assert (again.used_by, again.uses_left) == ((InvitationUse("b", 2),), 1), (
        "coming again counts once"
    )
    invitations.put_record(invitations.redeem_invitation(id, "c", now=4))
    with pytest.raises(TokenError, match="was for 2 PCs, which have joined"):
        invitations.redeem_invitation(id, "d", now=5)
    assert invitations.redeem_invitation(id, "b", now=6).uses_left == 0
    assert invitations.redeemed_by("c") == [id]
    assert invitations.redeemed_by("d") == []
    one = invitations.create_invitation("a", KEY, 0, now=1, owner=True).id
    invitations.put_record(invitations.redeem_invitation(one, "b", now=2))
    with pytest.raises(TokenError, match="was for 1 PC, which has joined"):
        invitations.redeem_invitation(one, "c", now=2)


@pytest.mark.parametrize("uses", [0, -1, 256])
def test_invalid_number_of_uses_is_rejected(uses: int) -> None:
    with pytest.raises(UsageError, match="for 1 to 255 PCs"):
        Invitations().create_invitation("a", KEY, 1, now=0, owner=True, uses=uses)


def test_used_up_invitations_do_not_displace_others() -> None:
    invitations = Invitations()
    fresh = invitations.create_invitation("a", KEY, 0, now=0, owner=True)
    for number in range(MAX_INVITATIONS):
        id = invitations.create_invitation("a", KEY, 0, now=1, owner=True).id
        invitations.put_record(invitations.redeem_invitation(id, f"b{number}", now=1))
    assert invitations.purge_expired(now=2) == []
    assert invitations.get_invitation(fresh.id) == fresh


def test_invitations_are_listed() -> None:
    invitations = Invitations()
    id = invitations.create_invitation("a", KEY, 10, now=1, owner=True, uses=2).id
    invitations.put_record(invitations.redeem_invitation(id, "b", now=2))
    (shown,) = json.loads(encode_invitations(list(invitations), str.upper))
    assert shown == {
        "id": id.removeprefix("invite:"),
        "created": 1,
        "expires": 11,
        "uses": 2,
        "left": 1,
        "creator": {"peer": "a", "name": "A"},
        "used": [{"peer": "b", "name": "B", "at": 2}],
    }
    many = [replace(record, max_uses=9) for record in invitations] * 5000
    text = encode_invitations(many, str.upper)
    assert 0 < len(json.loads(text)) < 5000
    assert len(text) < 200_000


def test_flood_ends_only_the_creators_own_invitations() -> None:
    invitations = Invitations()
    owners = invitations.create_invitation("owner", KEY, 0, now=0, owner=True)
    first = invitations.create_invitation("b", KEY, DAY, now=0, owner=False)
    for _ in range(MAX_INVITATIONS):
        invitations.create_invitation("b", KEY, DAY, now=0, owner=False)
    assert invitations.purge_expired(now=0) == [first.id]
    assert invitations.created_by("owner") == [owners.id]
    assert len(invitations.created_by("b")) == MAX_INVITATIONS


@pytest.mark.parametrize("ttl", [-1, float("nan"), float("inf"), 1e18])
def test_invalid_duration_is_rejected(ttl: float) -> None:
    with pytest.raises(UsageError, match="can't be valid for"):
        Invitations().create_invitation("a", KEY, ttl, now=0, owner=True)


@pytest.mark.parametrize("ttl", [0, 31 * DAY])
def test_only_owners_invitations_never_expire(ttl: int) -> None:
    with pytest.raises(NotAuthorized, match="more than 30 days"):
        Invitations().create_invitation("b", KEY, ttl, now=0, owner=False)
    assert Invitations().create_invitation("a", KEY, ttl, now=0, owner=True)


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
