"""Adapters in messages are bounded."""

import msgspec
import pytest

from molink.facts.model import MAX_ADAPTERS
from molink.wire.messages.data_plane import Admit, SamplingParams
from molink.wire.messages.serving import Request


@pytest.mark.parametrize("adapter", [-1, MAX_ADAPTERS + 1, 2**40, "one", None])
def test_numbers_are_bounded(adapter: object) -> None:
    good = Admit(1, 1, SamplingParams(), 1, adapter=MAX_ADAPTERS)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=Admit) == good
    bad = msgspec.structs.replace(good, adapter=adapter)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Admit)


@pytest.mark.parametrize("adapter", ["a" * 65, 1, None])
def test_names_are_bounded(adapter: object) -> None:
    good = Request("m", (), 1, SamplingParams(), adapter="a" * 64)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(good), type=Request) == good
    bad = msgspec.structs.replace(good, adapter=adapter)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=Request)
