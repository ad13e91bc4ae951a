import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.errors import WireError
from molink.link.volume import UnsentVolume
from molink.wire.messages.base import Payload
from molink.wire.messages.data import Lane, Rows, Volume, VolumePart

ROW = 8


def made(total: int) -> UnsentVolume:
    header = Volume(3, True, (Rows(1, 0, total, 0),), Payload("f32", (total, 2)))
    return UnsentVolume(header, Lane.BULK)


@given(
    pieces=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    grants=st.lists(st.integers(1, 40), min_size=1, max_size=10),
    maximum=st.integers(1, 20 * ROW),
    late=st.booleans(),
)
def test_messages_make_up_the_volume(
    pieces: list[int], grants: list[int], maximum: int, late: bool
) -> None:
    total = sum(pieces)
    data = bytes(byte % 251 for byte in range(total * ROW))
    out, came, turn, given = made(total), b"", 0, 0
    for count in pieces:
        assert out.add(memoryview(data)[given * ROW : (given + count) * ROW]) == count
        given += count
        while out.available and (late or given == total):
            grant = grants[turn % len(grants)]
            turn += 1
            body, rows, count = out.cut(grant, maximum)
            assert 1 <= count <= grant
            assert count == 1 or rows.nbytes <= maximum
            assert body.payload == Payload("f32", (count, 2))
            assert rows.nbytes == count * ROW
            assert isinstance(body, VolumePart if came else Volume)
            assert getattr(body, "first", 0) == len(came) // ROW
            came += rows
            assert out.valid() is (out.sent < total)
    assert came == data


def test_nothing_is_copied() -> None:
    data = bytearray(5 * ROW)
    out = made(5)
    out.add(data)
    _, rows, _ = out.cut(2, 1000)
    data[:ROW] = b"\1" * ROW
    assert rows[:ROW] == b"\1" * ROW
    assert (out.available, out.nbytes) == (3, 3 * ROW)


def test_rows_beyond_its_end() -> None:
    out = made(2)
    out.add(bytes(ROW))
    with pytest.raises(WireError, match="volume 3: 16 bytes are not 1 to 1 rows"):
        out.add(bytes(2 * ROW))
    assert out.valid()
