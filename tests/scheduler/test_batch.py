import msgspec

from molink.facts.drafts import MAX_DRAFTS
from molink.scheduler.batch import VolumeBuilder
from molink.scheduler.prefix_tree import PrefixMatch
from molink.scheduler.request_state import RequestState
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import MAX_SLICES, Channel, Frame, SamplingParams
from tests.support.request_states import arrived, make_state

MAX_HEADER = 4096
LATE = 2**53 - 1


def new_state(number: int, tokens: int) -> RequestState:
    """A request with the widest ids and sequence numbers."""
    request = make_state("d", "k", tuple(range(tokens)), tokens, 9, SamplingParams())
    made = arrived(request)
    made.start_admission(2**31 - 1 - number, [2**31 - 1] * tokens, PrefixMatch())
    made.last_seq = LATE - 1
    return made


def header_bytes(builder: VolumeBuilder) -> int:
    volume = msgspec.structs.replace(
        builder.build_volume(LATE).header, payload=Payload("bf16", (65536, 2**31 - 1))
    )
    return len(msgspec.msgpack.encode(Frame(LATE, Channel.BULK, LATE, volume)))


def test_slices_fit_into_the_header() -> None:
    builder = VolumeBuilder(prefill=False)
    while builder.block_room >= 1:
        builder.add_rows(new_state(len(builder), 1), 1, [2**31 - 1], 0)
    assert 100 < len(builder) <= MAX_SLICES
    assert header_bytes(builder) <= MAX_HEADER


def test_slices_without_blocks_fill_a_volume() -> None:
    builder = VolumeBuilder(prefill=False)
    while builder.block_room >= 1:
        builder.add_rows(new_state(len(builder), 1), 1, [], 0)
    assert len(builder) == MAX_SLICES
    assert header_bytes(builder) <= MAX_HEADER


def test_drafts_fit_into_the_header() -> None:
    builder = VolumeBuilder(prefill=False)
    requests = [new_state(number, 1) for number in range(60)]
    for each in requests:
        builder.add_rows(each, 1, [2**31 - 1], 0)
    for each in requests:
        count = min(MAX_DRAFTS, builder.draft_room)
        builder.add_drafts(each, [2**31 - 1] * count, [2**31 - 1] * count, 0)
    assert builder.draft_room == 0
    assert header_bytes(builder) <= MAX_HEADER
    rows = builder.build_volume(LATE).header.slices
    assert MAX_DRAFTS <= sum(len(group.drafts) for group in rows) <= MAX_SLICES - 60


def test_many_blocks_fill_a_volume() -> None:
    builder = VolumeBuilder(prefill=True)
    room = builder.block_room
    builder.add_rows(new_state(0, room), room, [2**31 - 1] * room, 0)
    assert builder.block_room < 1
    assert 3900 < header_bytes(builder) <= MAX_HEADER


def test_copy_sources_fit_beside_the_blocks() -> None:
    builder = VolumeBuilder(prefill=True)
    while builder.block_room >= 1:
        copying = new_state(len(builder), 1)
        copying.copy_source = 2**31 - 1
        builder.add_rows(copying, 1, [2**31 - 1] * min(7, builder.block_room), 0)
    assert 50 < len(builder) < MAX_SLICES
    assert 3300 < header_bytes(builder) <= MAX_HEADER
