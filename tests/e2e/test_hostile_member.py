"""A hostile PC that the swarm has admitted, against every message that members exchange.

``tests.support.hostile_member`` speaks for it; all others are real processes.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from molink.errors import MolinkError, PeerBanned, RequestError
from molink.facts.identity import derive_peer_id
from molink.swarm.election.replica import Replica, Version
from molink.swarm.election.terms import next_term, round_of
from molink.swarm.membership.join_token import JoinToken
from molink.swarm.membership.membership_log import MembershipLog
from molink.wire.messages.admin import AppendEntries, StatusRequest
from molink.wire.messages.base import Payload
from molink.wire.messages.control_plane import ControlMessage
from molink.wire.messages.election import LeaderRequest, LeaderView, StateReplica
from molink.wire.messages.instructions import PeerInfo, Revoked
from molink.wire.messages.membership import (
    AdmissionEntry,
    DepartureEntry,
    Founder,
    FoundingEntry,
    InvitationEndEntry,
    InvitationEntry,
    JoinEntry,
    OwnershipEntry,
    ReadmissionEntry,
    RevocationEntry,
    SignedEntry,
    Statement,
)
from molink.wire.sockets.key_pair import KeyPair
from molinkd.cli import daemon_client as local_daemon
from molinkd.peer.membership.membership_record import MembershipRecord, read_membership
from tests.support.hostile_member import (
    HOST,
    NO_VIEW,
    FakeCoordinator,
    HostileMember,
    LoopThread,
    can_connect,
    forge_entry,
    forge_replica,
    is_served,
)
from tests.support.processes import START_S, Process, Tools

#: Seconds for which a swarm has to withstand a rival, alone and with others, and ever higher terms.
ALONE_S, UNSEAT_S, TERMS_S = 3.0, 6.0, 4.0
#: Seconds in which a forged state would have spread.
SPREAD_S = 2.0
#: Before each status: a daemon admits ten handshakes a second under one key, its user's too.
POLL_S = 0.12
#: Rounds by which one branch may raise a term.
MAX_ROUNDS = 64
#: The branch may raise it once more per minute; these tests take up to this number.
MINUTES = 5
#: Clears the screen, sets the window's title, and moves the cursor.
ESCAPES = "\x1b[2J\x1b]0;gone\x07\x1b[1A"
COORDINATOR = "the coordinator"


@dataclass(frozen=True)
class Leader:
    """Who leads, by id, and the process of its coordinator."""

    peer: str
    pid: int


class HonestPCs:
    """Real PCs of one swarm, which ``first`` has founded."""

    def __init__(self, root: Path, tools: type[Tools]) -> None:
        self._root, self._tools, self.loop = root, tools, LoopThread()
        self.running: dict[str, Process] = {}
        #: Ids by name, also of those that have ended.
        self.peers: dict[str, str] = {}
        self._guests, self._serves = 0, False

    def found(self, *, serves: bool = False) -> None:
        """Found the swarm; the founder ``serves`` the demo's model alone, or nobody does.

        Its endpoint then still says which models there are.
        """
        self._serves = serves
        self._start("first", "up", "--dtype", "f32", "--stage", "auto" if serves else "none")
        if serves:
            self.first.wait_ready()

    def add(self, name: str) -> None:
        """Let another PC join that offers no layers."""
        self._start(name, "join", self.invite(), "--stage", "none")
        home = self.running[name].home
        self._tools.wait_for(home.replica.exists, self.running[name])

    def _start(self, name: str, *arguments: str) -> None:
        options = self._tools.local_options("--coordinator-port", "0", "--name", name)
        process = self._tools.Process(self._root / name, [*arguments, *options])
        self.running[name] = process
        self._tools.wait_for(process.home.membership.exists, process)
        self.peers[name] = derive_peer_id(process.home.load_keys().public)

    def readmit(self, name: str) -> None:
        """The founder revokes a PC, and readmits it; it joins again."""
        process = self.running.pop(name)
        local_daemon.revoke_peer(self.first.home, self.peers[name])
        assert process.process.wait(START_S) == PeerBanned.exit_code, process.output
        process.stop()
        # The coordinator has a new socket now: messages to the old one are lost.
        self._tools.wait_for(partial(self._unrevoke, self.peers[name]), self.first)
        self._start(name, "join", "--stage", "none")
        self._tools.wait_for(partial(self._is_led_by, name, self.peers["first"]), self.first)

    def _unrevoke(self, peer: str) -> bool:
        # It was readmitted already if the reply to an earlier request was lost.
        with contextlib.suppress(RequestError):
            local_daemon.unrevoke_peer(self.first.home, peer)
        return True

    def kill(self, name: str) -> None:
        """Kill a PC as a power failure would."""
        process = self.running.pop(name)
        for one in reversed(process.family()):
            one.kill()
        process.stop()

    def stop(self) -> None:
        """End all."""
        self.loop.close()
        for process in reversed(self.running.values()):
            process.stop()

    @property
    def first(self) -> Process:
        """The founder."""
        return self.running["first"]

    def invite(self, uses: int = 1) -> str:
        """A token of the founder."""
        return local_daemon.create_invitation(self.first.home, 3600.0, uses).token

    def admit(self, token: str = "") -> HostileMember:
        """A hostile member that has joined, by the founder's invitation if not by ``token``."""
        self._guests += 1
        name = f"guest-{self._guests}"
        home, token = self._root / name, token or self.invite()
        bad = HostileMember(self.loop, home, token, ESCAPES + name)
        try:
            bad.start().wait_welcome()
        except BaseException:
            bad.close()
            raise
        return bad

    def status(self, name: str = "first") -> dict[str, Any]:
        """``molink status --json`` of a PC."""
        time.sleep(POLL_S)
        return self.running[name].status()

    def members(self, name: str = "first") -> dict[str, str]:
        """Names of all members by id, by the status of a PC."""
        found = {peer["id"]: peer["name"] for peer in self.status(name)["peers"]}
        assert all(one.isprintable() for one in found.values())
        return found

    def leader(self, name: str = "first") -> Leader | None:
        """The leader by the status of a PC; ``None`` while that PC hears none."""
        status = self.status(name)
        if status["coordinator"]["state"] != "running":
            return None
        return Leader(status["leader"], status["coordinator"]["pid"])

    def round(self) -> int:
        """The leader's round."""
        return round_of(self.status()["term"])

    def check_answer(self) -> None:
        """Check that the founder's endpoint answers."""
        client = self._tools.client(self.first.found().endpoints[0])
        if not self._serves:
            client.models.list()
            return
        reply = client.chat.completions.create(
            model="molink-demo",
            messages=[{"role": "user", "content": "Who leads?"}],
            max_tokens=4,
            extra_body={"ignore_eos": True},
        )
        assert reply.choices[0].message.content

    def stays_led(self, by: Leader, seconds: float) -> None:
        """Check that for ``seconds`` this leader leads every PC, and that the endpoint answers."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name in self.running:
                assert self.leader(name) in (by, None), f"{name}: {self.told(name)}"
            assert psutil.pid_exists(by.pid), self.told("first")
            self.check_answer()
        for name, process in self.running.items():
            self._tools.wait_for(partial(self._is_led_by, name, by.peer), process)
            assert self.leader(name) in (by, None)
        online = {one["id"] for one in self.status()["peers"] if one["state"] == "online"}
        assert online >= set(self.peers.values())

    def wait_led_by(self, name: str) -> None:
        """Wait until the PC of that name leads all running PCs."""
        for one, process in self.running.items():
            self._tools.wait_for(partial(self._is_led_by, one, self.peers[name]), process)

    def _is_led_by(self, name: str, by: str) -> bool:
        leader = self.leader(name)
        return leader is not None and leader.peer == by

    def wait_gone(self, peer: str) -> None:
        """Wait until no running PC lists ``peer`` as a member."""
        for name, process in self.running.items():
            self._tools.wait_for(lambda name=name: peer not in self.members(name), process)

    def wait_banned(self, peer: str) -> None:
        """Wait until the founder has banned a member."""

        def is_banned() -> bool:
            return peer in [one["peer"] for one in self.status()["banned_peers"]]

        self._tools.wait_for(is_banned, self.first)

    def told(self, name: str) -> str:
        """Lines about elections in a daemon's log."""
        logs = sorted(self.running[name].home.logs.glob("*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        return "\n".join(line for line in lines if ".election." in line)

    @property
    def record(self) -> MembershipRecord:
        """The membership that a running PC has stored."""
        record = read_membership(next(iter(self.running.values())).home.membership)
        assert record is not None
        return record

    def doors(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Keys and addresses of all control sockets."""
        record = self.record
        doors = {COORDINATOR: (record.coordinator_key, record.endpoints)}
        for name, process in self.running.items():
            note = process.found().run_file
            address = f"tcp://{note.control_host}:{note.control_port}"
            doors[name] = process.home.load_keys().public, (address,)
        return doors

    def lets_in(self, keys: KeyPair) -> list[str]:
        """Sockets to which the holder of ``keys`` can connect."""
        return [
            name
            for name, (key, addresses) in self.doors().items()
            if can_connect(self.loop, keys, key, addresses)
        ]

    def serves(self, keys: KeyPair) -> list[str]:
        """Sockets that answer a member's question when the holder of ``keys`` asks it.

        A revoked PC is let in by the coordinator, to be told so.
        """
        swarm = self.record.swarm
        questions: dict[bool, ControlMessage] = {
            True: StatusRequest(ref=0),
            False: LeaderRequest(ref=0, swarm=swarm, view=NO_VIEW),
        }
        return [
            name
            for name, (key, addresses) in self.doors().items()
            if is_served(self.loop, keys, key, addresses, questions[name == COORDINATOR])
        ]

    def wait_served(self, keys: KeyPair) -> None:
        """Wait until every socket answers the holder of ``keys``."""
        everybody = [COORDINATOR, *self.running]
        self._tools.wait_for(lambda: self.serves(keys) == everybody, self.first)


@pytest.fixture(scope="module")
def swarm(
    tmp_path_factory: pytest.TempPathFactory, tools: type[Tools], request: pytest.FixtureRequest
) -> Iterator[HonestPCs]:
    """Two honest PCs besides the hostile one; with "pair" only one, which serves a model."""
    pair = getattr(request, "param", "") == "pair"
    swarm = HonestPCs(tmp_path_factory.mktemp("swarm"), tools)
    try:
        swarm.found(serves=pair)
        if not pair:
            swarm.add("second")
        yield swarm
    finally:
        swarm.stop()


@pytest.fixture
def doomed(tmp_path: Path, tools: type[Tools]) -> Iterator[HonestPCs]:
    """A swarm whose founder will be killed; others have yet to join."""
    swarm = HonestPCs(tmp_path, tools)
    try:
        swarm.found()
        yield swarm
    finally:
        swarm.stop()


# --- a forged state ------------------------------------------------------------------------------


def planted_info(keys: KeyPair) -> PeerInfo:
    """The announcement of a PC that no member has admitted."""
    return PeerInfo(
        peer=derive_peer_id(keys.public),
        name=f"{ESCAPES}nobody",
        public_key=keys.public,
        addresses=(HOST,),
        control_port=1,
    )


def admit(bad: HostileMember, keys: KeyPair) -> AdmissionEntry:
    """A member's signed admission of the holder of other keys."""
    return AdmissionEntry(bad.keys.signer.verify_key, keys.signer.verify_key, "again", 1.0)


class Forger:
    """Makes entries that ``bad`` may not make, in favour of the holders of other keys."""

    def __init__(self, bad: HostileMember, founder: str) -> None:
        held = bad.replica
        assert held is not None
        self.bad, self.held, self.swarm, self.log = bad, held, held.swarm, held.log
        #: The founder's id, and the key that it signs with.
        self.founder, self.owner_key = founder, held.log.members[founder].verify_key
        self.planted = [KeyPair.generate() for _ in range(5)]
        #: Keys of invitations that no member has made.
        self.guest = KeyPair.generate()
        #: A PC that it may admit, as any member may.
        self.friend = KeyPair.generate()

    @property
    def outsiders(self) -> list[KeyPair]:
        """All keys that must not connect."""
        return [*self.planted, self.guest]

    def forgeries(self) -> list[tuple[SignedEntry, ...]]:
        """Sets of entries, each invalid or without effect."""
        return [
            self.usurpations(),
            *((one,) for one in self.false_signatures()),
            self.founding(),
        ]

    def admission(self) -> SignedEntry:
        """A valid entry: it admits its friend."""
        return forge_entry(self.swarm, admit(self.bad, self.friend), self.bad.keys)

    def usurpations(self) -> tuple[SignedEntry, ...]:
        """Entries that only others may sign, signed by it or by keys that are no members'."""
        bad, guest = self.bad.keys, self.guest.signer.verify_key
        mine = bad.signer.verify_key
        first, *others = self.planted
        entries: list[tuple[Statement, KeyPair]] = [
            (OwnershipEntry(mine, self.bad.peer), bad),
            *((RevocationEntry(mine, peer, 1.0), bad) for peer in self.log.members),
            *((ReadmissionEntry(mine, one.hash), bad) for one in self.log.entries),
            *((InvitationEndEntry(mine, one.hash, ()), bad) for one in self.log.invitations),
            *((DepartureEntry(mine, one), bad) for one in self.entries_of_others()),
            (InvitationEntry(first.signer.verify_key, guest, 1.0, 0, 255), first),
            (JoinEntry(guest, first.signer.verify_key, ESCAPES, 1.0), self.guest),
        ]
        for one in others:
            admission = AdmissionEntry(first.signer.verify_key, one.signer.verify_key, ESCAPES, 1.0)
            entries.append((admission, first))
        return tuple(forge_entry(self.swarm, entry, by) for entry, by in entries)

    def entries_of_others(self) -> list[str]:
        """Hashes of all entries but its own join."""
        own = self.log.members[self.bad.peer].admission
        return [one.hash for one in self.log.entries if one.hash != own]

    def false_signatures(self) -> tuple[SignedEntry, ...]:
        """Entries that claim to be the founder's, with false signatures."""
        key, bad = self.owner_key, self.bad
        entries: list[Statement] = [
            OwnershipEntry(key, bad.peer),
            AdmissionEntry(key, self.planted[0].signer.verify_key, ESCAPES, 1.0),
            InvitationEntry(key, self.guest.signer.verify_key, 1.0, 0, 255),
            *(
                RevocationEntry(key, peer, 1.0)
                for peer in self.log.members
                if peer not in (self.founder, bad.peer)
            ),
        ]
        return tuple(forge_entry(self.swarm, one, bad.keys) for one in entries)

    def founding(self) -> tuple[SignedEntry, ...]:
        """Another founding entry, with itself as the founder."""
        founder = Founder(self.bad.keys.signer.verify_key, ESCAPES)
        return (SignedEntry(msgspec.msgpack.encode(FoundingEntry(bytes(16), (founder,))), b""),)

    def replica(self, version: Version, entries: tuple[SignedEntry, ...]) -> Replica:
        """The state with these entries, and with all planted PCs announced."""
        forged = forge_replica(self.held, version, *entries)
        announced = tuple(planted_info(keys) for keys in self.planted)
        return replace(forged, announced=(*self.held.announced, *announced))


def test_a_forged_state_plants_nobody(swarm: HonestPCs) -> None:
    with swarm.admit() as bad:
        before = swarm.members()
        forger = Forger(bad, swarm.peers["first"])
        term, revision = forger.held.version
        versions = itertools.cycle([(term, revision + 1), (next_term(term, bad.peer), 1)])
        for entries, version in zip(forger.forgeries(), versions, strict=False):
            bad.offer(forger.replica(version, entries))
        for entry in itertools.chain.from_iterable(forger.forgeries()):
            with contextlib.suppress(MolinkError):
                bad.ask(AppendEntries(ref=0, entries=(entry,)), 1.0)
        # Its valid entry is accepted, which shows that the PCs read the log.
        bad.offer(forger.replica((term, revision + 2), (forger.admission(),)))
        swarm.wait_served(forger.friend)
        admitted = {*before, derive_peer_id(forger.friend.public)}
        for name in swarm.running:
            assert swarm.members(name).keys() == admitted
            assert swarm.status(name)["revoked"] == []
        for keys in forger.outsiders:
            assert swarm.lets_in(keys) == []
    swarm.check_answer()


# --- a rival -------------------------------------------------------------------------------------


@pytest.mark.parametrize("swarm", ["pair", "trio"], indirect=True)
def test_a_living_leader_stays(swarm: HonestPCs) -> None:
    leader, began = swarm.leader(), swarm.round()
    assert leader is not None
    honest = swarm.peers.values()
    with contextlib.ExitStack() as stack:
        bad = stack.enter_context(swarm.admit())

        def claimed() -> int:
            return next_term(bad.term, bad.peer)

        def followed(one: HostileMember) -> LeaderView:
            return one.follows(bad.peer, claimed(), bad.issue_lease(claimed()))

        bad.keep_telling(honest, lambda: bad.claims(claimed()))
        if len(swarm.running) == 1:
            swarm.stays_led(leader, ALONE_S)
        # The PCs that it has invited follow it.
        token = bad.invite(3)
        for one in [stack.enter_context(swarm.admit(token)) for _ in range(3)]:
            one.keep_telling(honest, partial(followed, one))
        swarm.stays_led(leader, UNSEAT_S)
        assert swarm.round() <= began + MAX_ROUNDS + MINUTES


# --- terms ---------------------------------------------------------------------------------------


def test_one_member_burns_no_terms(swarm: HonestPCs) -> None:
    leader, began = swarm.leader(), swarm.round()
    assert leader is not None
    with swarm.admit() as bad:
        ahead = MAX_ROUNDS - 4
        rounds = itertools.count(MAX_ROUNDS)

        def climb() -> LeaderView:
            """The highest plausible term above the leader's."""
            return bad.lost(next_term(bad.term + (ahead << 16), bad.peer))

        def soar() -> LeaderView:
            return bad.lost(next_term(bad.term + (next(rounds) << 16), bad.peer))

        bad.keep_telling(swarm.peers.values(), climb, 0.02)
        swarm.stays_led(leader, TERMS_S)
        assert swarm.round() <= began + MAX_ROUNDS + MINUTES
        # A peer that continues is cut off.
        bad.keep_telling(swarm.peers.values(), soar, 0.02)
        swarm.wait_banned(bad.peer)
        assert not bad.can_reach(swarm.peers["first"])
        assert swarm.round() <= began + MAX_ROUNDS + MINUTES
        assert swarm.leader() == leader


# --- revocations ---------------------------------------------------------------------------------


def revoke(swarm: HonestPCs, bad: HostileMember) -> None:
    """Have the founder revoke it, and wait until all PCs know."""
    local_daemon.revoke_peer(swarm.first.home, bad.peer)
    swarm.wait_gone(bad.peer)


def test_a_revocation_ends_all_that_came_by_the_revoked(swarm: HonestPCs) -> None:
    before = swarm.members()
    with contextlib.ExitStack() as stack:
        bad = stack.enter_context(swarm.admit())
        unused, token = bad.invite(), bad.invite(2)
        friend = stack.enter_context(swarm.admit(token))
        grandchild = stack.enter_context(swarm.admit(friend.invite()))
        late = friend.invite()
        swarm.wait_served(grandchild.keys)
        revoke(swarm, bad)
        # Another member admits it again, and forwards entries that the revoked one has signed.
        helper = stack.enter_context(swarm.admit())
        held, stranger = helper.replica, KeyPair.generate()
        assert held is not None
        entries = [
            forge_entry(held.swarm, admit(one, key), one.keys)
            for one, key in ((helper, bad.keys), (bad, stranger))
        ]
        helper.offer(forge_replica(held, (held.term, held.revision + 9), *entries))
        for entry in entries:
            with contextlib.suppress(MolinkError):
                helper.ask(AppendEntries(ref=0, entries=(entry,)), 1.0)
        time.sleep(SPREAD_S)
        for keys in (bad.keys, friend.keys, grandchild.keys, stranger):
            assert swarm.serves(keys) == []
        for text in (unused, token, late):
            assert swarm.lets_in(KeyPair.from_seed(JoinToken.parse(text, 0.0).secret_key)) == []
        for name in swarm.running:
            assert swarm.members(name).keys() == before.keys() | {helper.peer}


# --- a dead leader -------------------------------------------------------------------------------


def test_a_lie_about_the_dead_leader_stops_no_election(doomed: HonestPCs) -> None:
    doomed.add("second")
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(doomed.admit())
        bad = stack.enter_context(doomed.admit())
        token = bad.invite(3)
        friend, other, king = (stack.enter_context(doomed.admit(token)) for _ in range(3))
        revoke(doomed, out)
        dead, second = doomed.peers["first"], doomed.peers["second"]
        # They claim to hear the dead leader, with and without its last lease, or each other.
        bad.keep_telling([second], lambda: bad.follows(dead, bad.term, bad.lease))
        friend.keep_telling([second], lambda: friend.follows(dead, bad.term, None))
        other.keep_telling(
            [second], lambda: other.follows(bad.peer, bad.term, bad.issue_lease(bad.term))
        )
        # Or they claim to lead at an address where nothing listens.
        king.answer = lambda: king.claims(next_term(bad.term, king.peer))
        doomed.kill("first")
        king.keep_telling([second], king.answer)
        doomed.wait_led_by("second")
        # PCs that were revoked before stay out.
        held = out.replica
        assert held is not None
        assert [one["id"] for one in doomed.status("second")["revoked"]] == [out.peer]
        record = doomed.record
        out.record = record
        out.offer(replace(held, term=next_term(record.term, out.peer), revision=1))
        out.keep_telling([second], lambda: out.claims(next_term(record.term, out.peer)))
        time.sleep(SPREAD_S)
        assert doomed.serves(out.keys) == []
        assert out.peer not in doomed.members("second")


def said_by_a_leader(forger: Forger, term: int) -> Iterator[tuple[ControlMessage, bytes | None]]:
    """Every message by which a leader may change the membership, with payloads.

    Among it a state in which nobody was ever revoked, and revocations that were ended. The last
    one says that its friend joins, which it may say.
    """
    log = forger.log.entries
    ends = (RevocationEntry, InvitationEndEntry)
    silent = [one for one in log if not isinstance(one.decode(), ends)]
    forgotten = replace(
        forger.replica((term, 1000), ()),
        log=MembershipLog(forger.swarm, {one.hash: one for one in silent}),
    )
    told = [*forger.forgeries(), (forger.admission(),)]
    states = [forger.replica((term, 1001 + number), one) for number, one in enumerate(told)]
    *forged, accepted = (
        (StateReplica(payload=Payload("u8", (len(data),))), data)
        for data in (state.encode() for state in (forgotten, *states))
    )
    yield from forged
    for keys in (*forger.planted, forger.friend):
        yield planted_info(keys), None
    returns = (ReadmissionEntry, AdmissionEntry)
    revoked = [one for one in log if not isinstance(one.decode(), returns)]
    for entries in (revoked, *((*log, *more) for more in forger.forgeries())):
        data = msgspec.msgpack.encode(entries)
        yield Revoked(swarm=forger.swarm, payload=Payload("u8", (len(data),))), data
    yield accepted


def test_a_hostile_leader_changes_no_membership(doomed: HonestPCs, tools: type[Tools]) -> None:
    with contextlib.ExitStack() as stack:
        bad = stack.enter_context(doomed.admit())
        out = stack.enter_context(doomed.admit())
        doomed.add("second")
        doomed.readmit("second")
        # It answers from now on: a query that a coordinator's restart starts may still wait below.
        bad.answer = lambda: bad.lost(bad.term)
        revoke(doomed, out)
        before = doomed.members("second")
        second = doomed.peers["second"]
        # It is the next to lead, and its coordinator accepts every peer.
        doomed.kill("first")
        fake = FakeCoordinator(bad, next_term(bad.term, bad.peer))
        stack.callback(fake.close)
        forger = Forger(bad, doomed.peers["first"])
        fake.script = list(said_by_a_leader(forger, fake.term))
        bad.keep_telling([second], lambda: bad.claims(fake.term, fake))
        bad.wait_for(lambda: second in fake.reported)
        # It has heard all once it serves the friend, of whom it hears last.
        process = doomed.running["second"]
        tools.wait_for(lambda: "second" in doomed.serves(forger.friend), process)
        for keys in (*forger.outsiders, out.keys):
            assert "second" not in doomed.serves(keys)
        # Once it is silent the other one leads, with the log from before.
        bad.silence()
        fake.close()
        doomed.wait_led_by("second")
        admitted = {*before, derive_peer_id(forger.friend.public)}
        assert doomed.members("second").keys() == admitted
        assert [one["id"] for one in doomed.status("second")["revoked"]] == [out.peer]
        for keys in (*forger.outsiders, out.keys):
            assert doomed.serves(keys) == []
