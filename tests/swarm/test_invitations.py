import pytest

from molink.errors import UsageError
from molink.swarm.invitations import MAX_INVITATIONS, Invitations


def test_it_holds_until_it_expires():
    invitations = Invitations()
    record, keys = invitations.create(10, now=100.5)
    forever, _ = invitations.create(0, now=100.5)
    assert record.public_key == keys.public
    assert (record.expires, forever.expires) == (111, 0)
    assert invitations.holds(record.id, now=110.9)
    assert not invitations.holds(record.id, now=111)
    assert not invitations.holds("invite:other", now=0)
    assert invitations.purge(now=110) == []
    assert invitations.purge(now=111) == [record.id]
    assert [one.id for one in invitations] == [forever.id]
    assert invitations.revoke(forever.id)
    assert not invitations.revoke(forever.id)


def test_there_are_never_too_many():
    invitations = Invitations()
    first, _ = invitations.create(0, now=0)
    for _ in range(MAX_INVITATIONS):
        invitations.create(0, now=0)
    assert invitations.purge(now=0) == [first.id]


@pytest.mark.parametrize("ttl", [-1, float("nan"), float("inf"), 1e18])
def test_a_nonsense_duration(ttl):
    with pytest.raises(UsageError, match="can't be valid for"):
        Invitations().create(ttl, now=0)
