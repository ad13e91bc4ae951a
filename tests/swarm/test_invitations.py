import pytest

from molink.errors import NotAuthorized, UsageError
from molink.swarm.invitations import MAX_INVITATIONS, Invitations

DAY = 86400
KEY = "k" * 40


def test_it_holds_until_it_expires() -> None:
    invitations = Invitations()
    record = invitations.create("a", KEY, 10, now=100.5, owner=True)
    forever = invitations.create("a", KEY, 0, now=100.5, owner=True)
    assert (record.public_key, record.creator) == (KEY, "a")
    assert (record.expires, forever.expires) == (111, 0)
    assert invitations.holds(record.id, now=110.9)
    assert not invitations.holds(record.id, now=111)
    assert not invitations.holds("invite:other", now=0)
    assert invitations.purge(now=110) == []
    assert invitations.purge(now=111) == [record.id]
    assert [one.id for one in invitations] == [forever.id]
    assert invitations.revoke(forever.id)
    assert not invitations.revoke(forever.id)


def test_a_flood_ends_the_flooders_own_only() -> None:
    invitations = Invitations()
    owners = invitations.create("owner", KEY, 0, now=0, owner=True)
    first = invitations.create("b", KEY, DAY, now=0, owner=False)
    for _ in range(MAX_INVITATIONS):
        invitations.create("b", KEY, DAY, now=0, owner=False)
    assert invitations.purge(now=0) == [first.id]
    assert invitations.of("owner") == [owners.id]
    assert len(invitations.of("b")) == MAX_INVITATIONS


@pytest.mark.parametrize("ttl", [-1, float("nan"), float("inf"), 1e18])
def test_a_nonsense_duration(ttl: float) -> None:
    with pytest.raises(UsageError, match="can't be valid for"):
        Invitations().create("a", KEY, ttl, now=0, owner=True)


@pytest.mark.parametrize("ttl", [0, 31 * DAY])
def test_only_an_owners_is_for_ever(ttl: int) -> None:
    with pytest.raises(NotAuthorized, match="more than 30 days"):
        Invitations().create("b", KEY, ttl, now=0, owner=False)
    assert Invitations().create("a", KEY, ttl, now=0, owner=True)
