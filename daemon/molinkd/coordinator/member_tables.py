"""Who is a member, and by which invitation: records in their tables, inside a transaction."""

import sqlite3
import time
from collections import defaultdict

import msgspec

from molink.swarm.controller.records import InvitationRecord, InvitationUse, MemberRecord, Standing
from molink.wire.messages.instructions import PeerInfo


class MemberTable:
    """All that ever joined."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read_all(self) -> list[MemberRecord]:
        """All, in the order of joining."""
        rows = self._db.execute(
            "SELECT peer, public_key, name, owner, standing, announced, invitation FROM members "
            "ORDER BY ordinal"
        )
        return [
            MemberRecord(
                peer,
                public_key,
                name,
                bool(owner),
                standing,
                None if announced is None else msgspec.msgpack.decode(announced, type=PeerInfo),
                invitation,
            )
            for peer, public_key, name, owner, standing, announced, invitation in rows
        ]

    def upsert_member(self, member: MemberRecord) -> None:
        """Add a member, or let one in again; an owner stays one."""
        self._db.execute(
            "INSERT INTO members (peer, public_key, name, owner, standing, invitation, joined) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (peer) DO UPDATE SET name = excluded.name, "
            "owner = max(owner, excluded.owner), standing = excluded.standing, "
            "invitation = coalesce(nullif(excluded.invitation, ''), invitation)",
            (
                member.peer,
                member.public_key,
                member.name,
                member.is_owner,
                member.standing,
                member.invitation,
                time.time(),
            ),
        )

    def set_standing(self, peer: str, standing: Standing) -> None:
        """A member left or was revoked, or is one again."""
        self._db.execute("UPDATE members SET standing = ? WHERE peer = ?", (standing, peer))

    def set_announced(self, member: PeerInfo) -> None:
        """What the others are told of a member."""
        self._db.execute(
            "UPDATE members SET announced = ?, name = ? WHERE peer = ?",
            (msgspec.msgpack.encode(member), member.name, member.peer),
        )


class InvitationTable:
    """Invitations that haven't been deleted, and who has joined by them."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def read_all(self) -> list[InvitationRecord]:
        """All, oldest first."""
        used: defaultdict[str, list[InvitationUse]] = defaultdict(list)
        for id, peer, at in self._db.execute(
            "SELECT invitation, peer, used FROM invitation_uses ORDER BY used, peer"
        ):
            used[id].append(InvitationUse(peer, at))
        rows = self._db.execute(
            "SELECT id, public_key, expires, creator, created, uses FROM invitations "
            "ORDER BY created, id"
        )
        return [
            InvitationRecord(id, public_key, expires, creator, created, uses, tuple(used[id]))
            for id, public_key, expires, creator, created, uses in rows
        ]

    def insert_invitation(self, invitation: InvitationRecord) -> None:
        """Add one, with the members that have joined by it."""
        self._db.execute(
            "INSERT INTO invitations (id, public_key, expires, creator, created, uses) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                invitation.id,
                invitation.public_key,
                invitation.expires_at,
                invitation.creator,
                invitation.created_at,
                invitation.max_uses,
            ),
        )
        self._db.executemany(
            "INSERT INTO invitation_uses (invitation, peer, used) VALUES (?, ?, ?)",
            [(invitation.id, use.peer, use.used_at) for use in invitation.used_by],
        )

    def insert_uses(self, invitation: InvitationRecord) -> None:
        """Members have joined by one; those that are written down already stay as they are."""
        self._db.executemany(
            "INSERT OR IGNORE INTO invitation_uses (invitation, peer, used) VALUES (?, ?, ?)",
            [(invitation.id, use.peer, use.used_at) for use in invitation.used_by],
        )

    def delete_invitation(self, id: str) -> None:
        """Forget one."""
        self._db.execute("DELETE FROM invitations WHERE id = ?", (id,))
