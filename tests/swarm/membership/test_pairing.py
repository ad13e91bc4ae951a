"""Pairing: exact actions, codes, and bounds."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import WireError
from molink.swarm.membership.pairing import (
    DECISION_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    MAX_JOINERS,
    MAX_JOINERS_PER_ADDRESS,
    MAX_PENDING,
    MAX_PENDING_PER_ADDRESS,
    MAX_WRONG_CODES,
    AdmitJoinerAction,
    ConfirmRefusalAction,
    DisconnectJoinerAction,
    JoinerConnectedEvent,
    JoinerDisconnectedEvent,
    JoinerMessageReceivedEvent,
    NameJoinerAction,
    PairingDecidedEvent,
    PairingEvent,
    PairingInitiator,
    PairingResponder,
    PairingTimePassedEvent,
    PublishPendingAction,
    ReportPairingErrorAction,
    SendToJoinerAction,
    make_commitment,
    normalize_code,
    short_code,
)
from molink.wire.messages.pairing import Challenge, Commitment, PairingResult, Reveal
from molink.wire.sockets.key_pair import KeyPair

PC, EVIL = KeyPair.from_seed("p" * 40), KeyPair.from_seed("e" * 40)
PC_KEY, EVIL_KEY = PC.signer.verify_key, EVIL.signer.verify_key
SWARM_KEY = "s" * 40


def nonce(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Scene:
    """The swarm's side, and joining PCs."""

    def __init__(self, key: str = SWARM_KEY) -> None:
        self.responder = PairingResponder("ab" * 8, "attic", key, 0.0)
        self.now = 0.0
        self.count = 0

    def handle(self, event: PairingEvent) -> list[object]:
        decisions = list(self.responder.handle(event, self.now))
        self.responder.validate()
        return decisions

    def arrive(self, address: str = "") -> int:
        self.count += 1
        one = JoinerConnectedEvent(
            self.count, address or f"10.0.0.{self.count}", nonce(1000 + self.count)
        )
        assert self.handle(one) == []
        return self.count

    def challenge(self, joiner: int, asked: Commitment) -> Challenge:
        (told,) = self.handle(JoinerMessageReceivedEvent(joiner, asked))
        assert isinstance(told, SendToJoinerAction)
        assert isinstance(told.message, Challenge)
        return told.message

    def wait(self, name: str = "pc", key: str = PC_KEY, address: str = "") -> tuple[int, str]:
        """A pending PC: its joiner number and code."""
        joiner = self.arrive(address)
        initiator = PairingInitiator(key, name, "1", nonce(joiner))
        reveal, code = initiator.answer_challenge(self.challenge(joiner, initiator.commitment))
        assert self.handle(JoinerMessageReceivedEvent(joiner, reveal)) == [PublishPendingAction()]
        return joiner, code

    def admit(self, code: str, name: str = "pc", key: str = PC_KEY) -> list[object]:
        """A member asks for the key, signs it, and admits the PC."""
        assert self.handle(PairingDecidedEvent(code)) == [NameJoinerAction(name, key)]
        return self.handle(PairingDecidedEvent(code, key))


def test_both_sides_show_one_code_that_admits_the_key() -> None:
    scene = Scene()
    joiner, code = scene.wait("attic\x1b[31m PC")
    (waiting,) = scene.responder.pending_requests
    assert (waiting.name, waiting.code, waiting.address) == ("attic31m PC", code, "10.0.0.1")
    assert scene.admit(code.replace("-", " "), "attic31m PC") == [
        PublishPendingAction(),
        AdmitJoinerAction(joiner, "attic31m PC"),
    ]
    assert scene.responder.pending_requests == []
    assert isinstance(
        scene.handle(PairingDecidedEvent(code, PC_KEY))[-1], ReportPairingErrorAction
    ), "a code admits once"


@pytest.mark.parametrize("signed", ["", EVIL_KEY, PC.public])
def test_a_pc_is_admitted_only_by_the_key_that_a_member_signed_for(signed: str) -> None:
    scene = Scene()
    joiner, code = scene.wait()
    assert scene.handle(PairingDecidedEvent(code, signed)) == [NameJoinerAction("pc", PC_KEY)]
    assert [one.code for one in scene.responder.pending_requests] == [code]
    assert scene.admit(code) == [PublishPendingAction(), AdmitJoinerAction(joiner, "pc")]


@pytest.mark.parametrize("shown", ["", EVIL_KEY, PC.public, "\xff" * 40, "0" * 40])
def test_a_pc_signs_with_the_key_that_it_connects_with(shown: str) -> None:
    """Otherwise a member would sign another PC's key than that of the PC that shows the code."""
    scene = Scene()
    joiner = scene.arrive()
    asked = PairingInitiator(PC_KEY, "pc", "1", nonce(1)).commitment
    message = msgspec.structs.replace(asked, verify_key=shown)
    assert scene.handle(JoinerMessageReceivedEvent(joiner, message)) == [
        DisconnectJoinerAction(joiner)
    ]
    assert scene.handle(JoinerDisconnectedEvent(joiner)) == []


def test_pcs_of_one_name_have_different_codes() -> None:
    scene = Scene()
    first, code = scene.wait("pc")
    _, other = scene.wait("pc", EVIL_KEY)
    assert code != other
    assert [one.name for one in scene.responder.pending_requests] == ["pc", "pc"]
    assert scene.admit(code)[-1] == AdmitJoinerAction(first, "pc")
    assert [one.code for one in scene.responder.pending_requests] == [other]


def test_refused_joiner_is_told() -> None:
    scene = Scene()
    joiner, code = scene.wait()
    assert scene.handle(PairingDecidedEvent(code, refuse=True)) == [
        PublishPendingAction(),
        SendToJoinerAction(joiner, PairingResult(outcome="refused")),
        ConfirmRefusalAction("pc"),
    ]


def test_three_wrong_codes_reject_all_pending_joiners() -> None:
    scene = Scene()
    joiner, code = scene.wait()
    wrong = "0000-0000" if code != "0000-0000" else "1111-1111"
    for _ in range(MAX_WRONG_CODES - 1):
        (denied,) = scene.handle(PairingDecidedEvent(wrong))
        assert isinstance(denied, ReportPairingErrorAction)
    (malformed,) = scene.handle(PairingDecidedEvent("4827"))
    assert isinstance(malformed, ReportPairingErrorAction), "malformed codes are not counted"
    assert scene.responder.pending_requests
    decisions = scene.handle(PairingDecidedEvent(wrong))
    assert decisions[:2] == [
        PublishPendingAction(),
        SendToJoinerAction(joiner, PairingResult(outcome="refused")),
    ]
    assert isinstance(decisions[2], ReportPairingErrorAction)
    (nobody,) = scene.handle(PairingDecidedEvent(code))
    assert isinstance(nobody, ReportPairingErrorAction)


def test_joiners_expire() -> None:
    scene = Scene()
    silent = scene.arrive()
    scene.now = HANDSHAKE_TIMEOUT_S
    assert scene.handle(PairingTimePassedEvent()) == [DisconnectJoinerAction(silent)]
    joiner, _ = scene.wait()
    scene.now += DECISION_TIMEOUT_S - 0.1
    assert scene.handle(PairingTimePassedEvent()) == []
    scene.now += 0.1
    assert scene.handle(PairingTimePassedEvent()) == [
        PublishPendingAction(),
        SendToJoinerAction(joiner, PairingResult(outcome="expired")),
    ]
    assert scene.handle(JoinerDisconnectedEvent(joiner)) == []


def test_disconnected_joiner_is_not_pending() -> None:
    scene = Scene()
    joiner, code = scene.wait()
    assert scene.handle(JoinerDisconnectedEvent(joiner)) == [PublishPendingAction()]
    (denied,) = scene.handle(PairingDecidedEvent(code))
    assert isinstance(denied, ReportPairingErrorAction)


def test_out_of_order_messages_disconnect() -> None:
    scene = Scene()
    asked = PairingInitiator(PC_KEY, "pc", "1", nonce(1)).commitment
    early = scene.arrive()
    assert scene.handle(JoinerMessageReceivedEvent(early, Reveal(nonce=nonce(1)))) == [
        DisconnectJoinerAction(early)
    ]
    twice = scene.arrive()
    scene.challenge(twice, asked)
    assert scene.handle(JoinerMessageReceivedEvent(twice, asked)) == [DisconnectJoinerAction(twice)]
    false = scene.arrive()
    scene.challenge(false, asked)
    assert scene.handle(JoinerMessageReceivedEvent(false, Reveal(nonce=nonce(2)))) == [
        DisconnectJoinerAction(false)
    ]
    # A commitment binds the key too.
    stolen = scene.arrive()
    scene.challenge(
        stolen, msgspec.structs.replace(asked, public_key=EVIL.public, verify_key=EVIL_KEY)
    )
    assert scene.handle(JoinerMessageReceivedEvent(stolen, Reveal(nonce=nonce(1)))) == [
        DisconnectJoinerAction(stolen)
    ]
    joiner, _ = scene.wait()
    assert scene.handle(JoinerMessageReceivedEvent(joiner, Reveal(nonce=nonce(1)))) == [
        PublishPendingAction(),
        DisconnectJoinerAction(joiner),
    ]


def test_inadmissible_key_is_never_pending() -> None:
    scene = Scene()
    joiner = scene.arrive()
    asked = PairingInitiator(PC_KEY, "pc", "1", nonce(1)).commitment
    assert scene.handle(JoinerMessageReceivedEvent(joiner, asked, "revoked")) == [
        SendToJoinerAction(joiner, PairingResult(outcome="revoked"))
    ]


def test_replayed_messages_give_another_code() -> None:
    """Recorded messages are useless: the swarm's nonce differs."""
    scene = Scene()
    initiator = PairingInitiator(PC_KEY, "pc", "1", nonce(7))
    codes = []
    for _ in range(2):
        joiner = scene.arrive()
        reveal, code = initiator.answer_challenge(scene.challenge(joiner, initiator.commitment))
        scene.handle(JoinerMessageReceivedEvent(joiner, reveal))
        codes.append(code)
    assert codes[0] != codes[1]
    assert [one.code for one in scene.responder.pending_requests] == codes


def test_man_in_the_middle_gets_other_codes() -> None:
    """The attacker has to commit to keys and nonces before either code is known."""
    swarm, evil = Scene(), Scene(EVIL.public)
    pc = PairingInitiator(PC_KEY, "pc", "1", nonce(7))
    # The attacker plays the swarm to the PC, and the PC to the swarm.
    to_pc = evil.challenge(evil.arrive(), pc.commitment)
    _, shown_by_pc = pc.answer_challenge(to_pc)
    _, shown_by_swarm = swarm.wait("pc", EVIL_KEY)
    assert shown_by_pc != shown_by_swarm
    # Changing only keys, or any other field, changes the code too.
    challenge = to_pc
    code = short_code(pc.commitment, challenge, nonce(7))
    for asked, other in (
        (msgspec.structs.replace(pc.commitment, public_key=EVIL.public), challenge),
        (msgspec.structs.replace(pc.commitment, verify_key=EVIL_KEY), challenge),
        (msgspec.structs.replace(pc.commitment, name="another"), challenge),
        (pc.commitment, msgspec.structs.replace(challenge, public_key=SWARM_KEY)),
        (pc.commitment, msgspec.structs.replace(challenge, name="another")),
        (pc.commitment, msgspec.structs.replace(challenge, nonce=nonce(9))),
    ):
        assert short_code(asked, other, nonce(7)) != code
    with pytest.raises(WireError, match="own key"):
        pc.answer_challenge(msgspec.structs.replace(challenge, public_key=PC.public))


def test_duplicate_code_admits_nobody() -> None:
    scene = Scene()
    joiner, code = scene.wait()
    other, _ = scene.wait("pc", EVIL_KEY)
    scene.responder._joiners[other].code = code
    decisions = scene.handle(PairingDecidedEvent(code))
    assert SendToJoinerAction(joiner, PairingResult(outcome="refused")) in decisions
    assert SendToJoinerAction(other, PairingResult(outcome="refused")) in decisions
    assert isinstance(decisions[-1], ReportPairingErrorAction)
    assert scene.responder.pending_requests == []


def test_joiners_are_bounded() -> None:
    """A new connection replaces the oldest silent one; pending requests stay."""
    scene = Scene()
    scene.wait(address="10.9.9.9")
    silent = [scene.arrive("10.9.9.9") for _ in range(MAX_JOINERS_PER_ADDRESS)]
    assert scene.handle(JoinerConnectedEvent(99, "10.9.9.9", nonce(99))) == [
        DisconnectJoinerAction(silent[0])
    ]
    for _ in range(MAX_JOINERS - MAX_JOINERS_PER_ADDRESS):
        scene.arrive()
    assert scene.handle(JoinerConnectedEvent(100, "10.0.1.1", nonce(100))) == [
        DisconnectJoinerAction(silent[1])
    ]
    assert len(scene.responder.pending_requests) == 1


def test_pairing_attempts_of_one_address_are_rate_limited() -> None:
    scene = Scene()
    for _ in range(MAX_PENDING_PER_ADDRESS):
        scene.wait(address="10.9.9.9")
    joiner = scene.arrive("10.9.9.9")
    initiator = PairingInitiator(EVIL_KEY, "pc", "1", nonce(5))
    reveal, _ = initiator.answer_challenge(scene.challenge(joiner, initiator.commitment))
    busy = [SendToJoinerAction(joiner, PairingResult(outcome="busy"))]
    assert scene.handle(JoinerMessageReceivedEvent(joiner, reveal)) == busy
    scene.wait()
    while len(scene.responder.pending_requests) < MAX_PENDING:
        scene.wait()
    joiner = scene.arrive()
    reveal, _ = initiator.answer_challenge(scene.challenge(joiner, initiator.commitment))
    assert scene.handle(JoinerMessageReceivedEvent(joiner, reveal)) == [
        SendToJoinerAction(joiner, PairingResult(outcome="busy"))
    ]


def test_pairing_attempts_are_rate_limited_overall() -> None:
    """Each attempt has a chance to show another PC's code."""
    scene, let_in = Scene(), 0
    for _ in range(1000):
        joiner = scene.arrive("10.9.9.9")
        (told,) = scene.handle(
            JoinerMessageReceivedEvent(
                joiner, PairingInitiator(EVIL_KEY, "pc", "1", nonce(1)).commitment
            )
        )
        assert isinstance(told, SendToJoinerAction)
        let_in += isinstance(told.message, Challenge)
        scene.handle(JoinerDisconnectedEvent(joiner))
        scene.now += 0.1
    assert let_in <= 6 + 10
    scene.wait(address="10.0.0.1")


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("48271931", "4827-1931"),
        (" 4827 - 1931\n", "4827-1931"),
        ("4827-193", None),
        ("4827-193x", None),
        ("४८२७-१९३१", None),
        ("", None),
    ],
)
def test_typed_codes_are_normalized(typed: str, code: str | None) -> None:
    assert normalize_code(typed) == code


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_code_has_eight_digits(own: bytes, theirs: bytes) -> None:
    initiator = PairingInitiator(PC_KEY, "n" * 100, "1" * 100, own)
    challenge = Challenge(swarm="ab" * 8, name="attic", public_key=SWARM_KEY, nonce=theirs)
    reveal, code = initiator.answer_challenge(challenge)
    assert normalize_code(code) == code
    assert make_commitment(PC.public, reveal.nonce) == initiator.commitment.commitment


joiners = st.integers(1, 6)
keys = st.sampled_from([PC_KEY, EVIL_KEY])
events = st.one_of(
    st.builds(
        JoinerConnectedEvent,
        st.integers(1, 60),
        st.sampled_from(["a", "b", "c"]),
        st.just(nonce(3)),
    ),
    st.builds(
        JoinerMessageReceivedEvent,
        joiners,
        st.one_of(
            keys.map(lambda key: PairingInitiator(key, "pc", "1", nonce(1)).commitment),
            st.integers(1, 2).map(lambda number: Reveal(nonce=nonce(number))),
        ),
        st.sampled_from([None, None, None, "full"]),
    ),
    st.builds(JoinerDisconnectedEvent, joiners),
    st.builds(PairingDecidedEvent, st.sampled_from(["", "0000-0000", "of one"]), keys),
    st.just(PairingTimePassedEvent()),
)


@settings(max_examples=50)
@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.1, 5.0, 100.0])), max_size=60))
def test_only_a_shown_code_admits(
    steps: list[tuple[PairingEvent, float]],
) -> None:
    """Only the PC's own key is admitted. Bounds hold, and joiners with a result are dropped."""
    scene = Scene()
    arrived: set[int] = set()
    for event, pause in steps:
        scene.now += pause
        if isinstance(event, JoinerConnectedEvent):
            if event.joiner in arrived:
                continue
            arrived.add(event.joiner)
        shown = [one.code for one in scene.responder.pending_requests]
        committed = {joiner: one.commitment for joiner, one in scene.responder._joiners.items()}
        if isinstance(event, PairingDecidedEvent) and event.code == "of one" and shown:
            event = replace(event, code=shown[0])
        decisions = scene.handle(event)
        for decision in decisions:
            if isinstance(decision, AdmitJoinerAction):
                assert isinstance(event, PairingDecidedEvent)
                assert event.code in shown
                admitted = committed[decision.joiner]
                assert admitted is not None
                assert admitted.verify_key == event.verify_key
            if isinstance(decision, SendToJoinerAction) and isinstance(
                decision.message, PairingResult
            ):
                assert scene.handle(JoinerDisconnectedEvent(decision.joiner)) == []
        if [one.code for one in scene.responder.pending_requests] != shown:
            assert PublishPendingAction() in decisions
