import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import WireError
from molink.link.link_queues import UnsentVolume
from molink.wire.messages.base import Payload
from molink.wire.messages.data_plane import Channel, RequestSlice, Volume, VolumeFragment

ROW = 8


def made(total: int) -> UnsentVolume:
    header = Volume(3, True, (RequestSlice(1, 0, total, 0),), Payload("f32", (total, 2)))
    return UnsentVolume(header, Channel.BULK)


@given(
    fragments=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    grants=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    maximum=st.integers(1, 20 * ROW),
    late=st.booleans(),
)
def test_fragments_make_up_the_volume(
    fragments: list[int], grants: list[int], maximum: int, late: bool
) -> None:
    total = sum(fragments)
    data = bytes(byte % 251 for byte in range(total * ROW))
    out, came, index, given = made(total), b"", 0, 0
    for count in fragments:
        assert out.add_rows(memoryview(data)[given * ROW : (given + count) * ROW]) == count
        given += count
        while out.available_rows and (late or given == total):
            grant = grants[index % len(grants)]
            index += 1
            body, rows, count = out.cut_fragment(grant, maximum)
            assert 1 <= count <= grant
            assert count == 1 or rows.nbytes <= maximum
            assert body.payload == Payload("f32", (count, 2))
            assert rows.nbytes == count * ROW
            assert isinstance(body, VolumeFragment if came else Volume)
            assert getattr(body, "first", 0) == len(came) // ROW
            came += rows
            assert out.is_valid() is (out.sent_rows < total)
    assert came == data


def test_fragments_are_not_copied() -> None:
    data = bytearray(5 * ROW)
    out = made(5)
    out.add_rows(data)
    _, rows, _ = out.cut_fragment(2, 1000)
    data[:ROW] = b"\1" * ROW
    assert rows[:ROW] == b"\1" * ROW
    assert (out.available_rows, out.nbytes) == (3, 3 * ROW)


def test_rows_beyond_the_end_are_rejected() -> None:
    out = made(2)
    out.add_rows(bytes(ROW))
    with pytest.raises(WireError, match="volume 3: 16 bytes are not 1 to 1 rows"):
        out.add_rows(bytes(2 * ROW))
    assert out.is_valid()
