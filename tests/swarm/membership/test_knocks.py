"""Who knocks, and the code by which a person tells them apart: exact decisions, and bounds."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.errors import WireError
from molink.swarm.membership.knocks import (
    MAX_OF_ADDRESS,
    MAX_VISITORS,
    MAX_WAITING,
    MAX_WAITING_OF_ADDRESS,
    TALK_S,
    WAIT_S,
    WRONG_CODES,
    Arrived,
    Changed,
    Denied,
    Event,
    Gone,
    HangUp,
    Judge,
    Knocker,
    Knocks,
    LetIn,
    Passed,
    Refused,
    Said,
    Tell,
    commitment,
    normal_code,
    short_code,
)
from molink.wire.messages.porch import Challenge, Commitment, Reveal, Verdict

SWARM_KEY, PC_KEY, EVIL_KEY = "s" * 40, "p" * 40, "e" * 40


def nonce(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Scene:
    """A swarm's side, and PCs before it."""

    def __init__(self, key: str = SWARM_KEY) -> None:
        self.knocks = Knocks("ab" * 8, "attic", key, 0.0)
        self.now = 0.0
        self.count = 0

    def handle(self, event: Event) -> list[object]:
        decisions = list(self.knocks.handle(event, self.now))
        self.knocks.validate()
        return decisions

    def arrive(self, address: str = "") -> int:
        self.count += 1
        one = Arrived(self.count, address or f"10.0.0.{self.count}", nonce(1000 + self.count))
        assert self.handle(one) == []
        return self.count

    def challenge(self, visitor: int, asked: Commitment) -> Challenge:
        (told,) = self.handle(Said(visitor, asked))
        assert isinstance(told, Tell)
        assert isinstance(told.message, Challenge)
        return told.message

    def wait(self, name: str = "pc", key: str = PC_KEY, address: str = "") -> tuple[int, str]:
        """A PC that waits for a person: its visitor and the code that it shows."""
        visitor = self.arrive(address)
        knocker = Knocker(key, name, "1", nonce(visitor))
        reveal, code = knocker.answer(self.challenge(visitor, knocker.asked))
        assert self.handle(Said(visitor, reveal)) == [Changed()]
        return visitor, code


def test_both_sides_show_one_code_and_it_lets_that_key_in() -> None:
    scene = Scene()
    visitor, code = scene.wait("attic\x1b[31m PC")
    (waiting,) = scene.knocks.waiting
    assert (waiting.name, waiting.code, waiting.address) == ("attic[31m PC", code, "10.0.0.1")
    assert scene.handle(Judge(code.replace("-", " "), "owner")) == [
        Changed(),
        LetIn(visitor, PC_KEY, "attic[31m PC", "owner"),
    ]
    assert scene.knocks.waiting == []
    assert isinstance(scene.handle(Judge(code, "owner"))[-1], Denied), "a code counts once"


def test_two_pcs_of_one_name_have_their_own_codes() -> None:
    scene = Scene()
    first, code = scene.wait("pc")
    _, other = scene.wait("pc", EVIL_KEY)
    assert code != other
    assert [one.name for one in scene.knocks.waiting] == ["pc", "pc"]
    assert scene.handle(Judge(code, "owner"))[-1] == LetIn(first, PC_KEY, "pc", "owner")
    assert [one.code for one in scene.knocks.waiting] == [other]


def test_refused() -> None:
    scene = Scene()
    visitor, code = scene.wait()
    assert scene.handle(Judge(code, "owner", refuse=True)) == [
        Changed(),
        Tell(visitor, Verdict(outcome="refused")),
        Refused("pc"),
    ]


def test_three_wrong_codes_send_those_who_wait_away() -> None:
    scene = Scene()
    visitor, code = scene.wait()
    wrong = "0000-0000" if code != "0000-0000" else "1111-1111"
    for _ in range(WRONG_CODES - 1):
        (denied,) = scene.handle(Judge(wrong, "owner"))
        assert isinstance(denied, Denied)
    (malformed,) = scene.handle(Judge("4827", "owner"))
    assert isinstance(malformed, Denied), "what is no code is no try"
    assert scene.knocks.waiting
    decisions = scene.handle(Judge(wrong, "owner"))
    assert decisions[:2] == [Changed(), Tell(visitor, Verdict(outcome="refused"))]
    assert isinstance(decisions[2], Denied)
    (nobody,) = scene.handle(Judge(code, "owner"))
    assert isinstance(nobody, Denied)


def test_times() -> None:
    scene = Scene()
    silent = scene.arrive()
    scene.now = TALK_S
    assert scene.handle(Passed()) == [HangUp(silent)]
    visitor, _ = scene.wait()
    scene.now += WAIT_S - 0.1
    assert scene.handle(Passed()) == []
    scene.now += 0.1
    assert scene.handle(Passed()) == [Changed(), Tell(visitor, Verdict(outcome="expired"))]
    assert scene.handle(Gone(visitor)) == []


def test_who_goes_waits_no_more() -> None:
    scene = Scene()
    visitor, code = scene.wait()
    assert scene.handle(Gone(visitor)) == [Changed()]
    (denied,) = scene.handle(Judge(code, "owner"))
    assert isinstance(denied, Denied)


def test_what_a_visitor_may_not_say() -> None:
    scene = Scene()
    asked = Knocker(PC_KEY, "pc", "1", nonce(1)).asked
    early = scene.arrive()
    assert scene.handle(Said(early, Reveal(nonce=nonce(1)))) == [HangUp(early)]
    twice = scene.arrive()
    scene.challenge(twice, asked)
    assert scene.handle(Said(twice, asked)) == [HangUp(twice)]
    false = scene.arrive()
    scene.challenge(false, asked)
    assert scene.handle(Said(false, Reveal(nonce=nonce(2)))) == [HangUp(false)]
    # A commitment is to a key too: another's is no use.
    stolen = scene.arrive()
    scene.challenge(stolen, msgspec.structs.replace(asked, public_key=EVIL_KEY))
    assert scene.handle(Said(stolen, Reveal(nonce=nonce(1)))) == [HangUp(stolen)]
    visitor, _ = scene.wait()
    assert scene.handle(Said(visitor, Reveal(nonce=nonce(1)))) == [Changed(), HangUp(visitor)]


def test_a_key_that_cannot_be_let_in_bothers_nobody() -> None:
    scene = Scene()
    visitor = scene.arrive()
    asked = Knocker(PC_KEY, "pc", "1", nonce(1)).asked
    assert scene.handle(Said(visitor, asked, "revoked")) == [
        Tell(visitor, Verdict(outcome="revoked"))
    ]


def test_a_replay_shows_another_code() -> None:
    """Whoever has recorded a knock can say the same again; the swarm's nonce is another one."""
    scene = Scene()
    knocker = Knocker(PC_KEY, "pc", "1", nonce(7))
    codes = []
    for _ in range(2):
        visitor = scene.arrive()
        reveal, code = knocker.answer(scene.challenge(visitor, knocker.asked))
        scene.handle(Said(visitor, reveal))
        codes.append(code)
    assert codes[0] != codes[1]
    assert [one.code for one in scene.knocks.waiting] == codes


def test_a_man_in_the_middle_shows_other_codes() -> None:
    """He has to settle on his keys and nonces before he knows either code."""
    swarm, evil = Scene(), Scene(EVIL_KEY)
    pc = Knocker(PC_KEY, "pc", "1", nonce(7))
    # To the PC he is the swarm, to the swarm he is the PC.
    to_pc = evil.challenge(evil.arrive(), pc.asked)
    _, shown_by_pc = pc.answer(to_pc)
    _, shown_by_swarm = swarm.wait("pc", EVIL_KEY)
    assert shown_by_pc != shown_by_swarm
    # Nor can he change the keys alone, or anything else that is said.
    challenge = to_pc
    code = short_code(pc.asked, challenge, nonce(7))
    for asked, other in (
        (msgspec.structs.replace(pc.asked, public_key=EVIL_KEY), challenge),
        (msgspec.structs.replace(pc.asked, name="another"), challenge),
        (pc.asked, msgspec.structs.replace(challenge, public_key=SWARM_KEY)),
        (pc.asked, msgspec.structs.replace(challenge, name="another")),
        (pc.asked, msgspec.structs.replace(challenge, nonce=nonce(9))),
    ):
        assert short_code(asked, other, nonce(7)) != code
    with pytest.raises(WireError, match="own key"):
        pc.answer(msgspec.structs.replace(challenge, public_key=PC_KEY))


def test_one_code_shown_twice_lets_nobody_in() -> None:
    scene = Scene()
    visitor, code = scene.wait()
    other, _ = scene.wait("pc", EVIL_KEY)
    scene.knocks._visitors[other].code = code
    decisions = scene.handle(Judge(code, "owner"))
    assert Tell(visitor, Verdict(outcome="refused")) in decisions
    assert Tell(other, Verdict(outcome="refused")) in decisions
    assert isinstance(decisions[-1], Denied)
    assert scene.knocks.waiting == []


def test_bounds() -> None:
    scene = Scene()
    for _ in range(MAX_OF_ADDRESS):
        scene.arrive("10.9.9.9")
    assert scene.handle(Arrived(99, "10.9.9.9", nonce(99))) == [HangUp(99)]
    for _ in range(MAX_VISITORS - MAX_OF_ADDRESS):
        scene.arrive()
    assert scene.handle(Arrived(99, "10.0.1.1", nonce(99))) == [HangUp(99)]


def test_one_address_has_few_knocks_and_leaves_room_for_others() -> None:
    scene = Scene()
    for _ in range(MAX_WAITING_OF_ADDRESS):
        scene.wait(address="10.9.9.9")
    visitor = scene.arrive("10.9.9.9")
    knocker = Knocker(EVIL_KEY, "pc", "1", nonce(5))
    reveal, _ = knocker.answer(scene.challenge(visitor, knocker.asked))
    busy = [Tell(visitor, Verdict(outcome="busy"))]
    assert scene.handle(Said(visitor, reveal)) == busy
    scene.wait()
    while len(scene.knocks.waiting) < MAX_WAITING:
        scene.wait()
    visitor = scene.arrive()
    reveal, _ = knocker.answer(scene.challenge(visitor, knocker.asked))
    assert scene.handle(Said(visitor, reveal)) == [Tell(visitor, Verdict(outcome="busy"))]


def test_knocks_without_end_are_put_off() -> None:
    """Each is a chance to show another PC's code."""
    scene, let_in = Scene(), 0
    for _ in range(1000):
        visitor = scene.arrive("10.9.9.9")
        (told,) = scene.handle(Said(visitor, Knocker(EVIL_KEY, "pc", "1", nonce(1)).asked))
        assert isinstance(told, Tell)
        let_in += isinstance(told.message, Challenge)
        scene.handle(Gone(visitor))
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
def test_what_a_person_types(typed: str, code: str | None) -> None:
    assert normal_code(typed) == code


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_a_code_is_eight_digits(own: bytes, theirs: bytes) -> None:
    knocker = Knocker(PC_KEY, "n" * 100, "1" * 100, own)
    challenge = Challenge(swarm="ab" * 8, name="attic", public_key=SWARM_KEY, nonce=theirs)
    reveal, code = knocker.answer(challenge)
    assert normal_code(code) == code
    assert commitment(PC_KEY, reveal.nonce) == knocker.asked.commitment


visitors = st.integers(1, 6)
keys = st.sampled_from([PC_KEY, EVIL_KEY])
events = st.one_of(
    st.builds(Arrived, st.integers(1, 60), st.sampled_from(["a", "b", "c"]), st.just(nonce(3))),
    st.builds(
        Said,
        visitors,
        st.one_of(
            keys.map(lambda key: Knocker(key, "pc", "1", nonce(1)).asked),
            st.integers(1, 2).map(lambda number: Reveal(nonce=nonce(number))),
        ),
        st.sampled_from([None, None, None, "full"]),
    ),
    st.builds(Gone, visitors),
    st.builds(Judge, st.sampled_from(["", "0000-0000", "of one"]), st.just("owner")),
    st.just(Passed()),
)


@settings(max_examples=200)
@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.1, 5.0, 100.0])), max_size=60))
def test_whatever_happens_only_a_shown_code_lets_in(steps: list[tuple[Event, float]]) -> None:
    """And it stays within its bounds; a visitor that is told a verdict is forgotten."""
    scene = Scene()
    arrived: set[int] = set()
    for event, pause in steps:
        scene.now += pause
        if isinstance(event, Arrived):
            if event.visitor in arrived:
                continue
            arrived.add(event.visitor)
        shown = [one.code for one in scene.knocks.waiting]
        if isinstance(event, Judge) and event.code == "of one" and shown:
            event = replace(event, code=shown[0])
        decisions = scene.handle(event)
        for decision in decisions:
            if isinstance(decision, LetIn):
                assert isinstance(event, Judge)
                assert event.code in shown
            if isinstance(decision, Tell) and isinstance(decision.message, Verdict):
                assert scene.handle(Gone(decision.visitor)) == []
        if [one.code for one in scene.knocks.waiting] != shown:
            assert Changed() in decisions
