"""Load messages stay small for any values."""

import msgspec
import pytest

from molink.facts.device import Device
from molink.wire.messages.codec import MAX_HEADER, control_codec
from molink.wire.messages.load import (
    MAX_PEER_ID,
    MAX_QUEUES,
    MAX_REQUESTS,
    MAX_SCHEDULERS,
    MAX_STAGES,
    PeerLoad,
    RequestLoad,
    SchedulerLoad,
    StageLoad,
)
from molink.wire.messages.peer_reports import PeerReport

MUCH = 2**40


def report(load: PeerLoad | None) -> PeerReport:
    return PeerReport(
        name="pc",
        version="0.1.0",
        addresses=("192.168.100.100",) * 4,
        control_port=5466,
        api_address="http://127.0.0.1:5465",
        daemon_pid=12345,
        stage="auto",
        device=Device(kind="cuda", name="NVIDIA GeForce RTX 3060", memory=12 * 10**9),
        models=("organisation/a-model-of-some-name-8b-instruct",),
        load=load,
    )


def test_largest_load_fits_a_report() -> None:
    stage = StageLoad("p12", 3, 99, 99, 128, MUCH, MUCH, 250_000, MUCH, (MUCH, MUCH), (MUCH, MUCH))
    request = RequestLoad("0123456789abcdef", "prefill", 131_072, 131_072, 131_072, 99_999, 9999)
    header = SchedulerLoad("p12", 128, 64, 99_999, 99_999, 16, (request,) * MAX_REQUESTS, 100)
    header = msgspec.structs.replace(header, queues=(9999,) * MAX_QUEUES)
    full = report(PeerLoad((stage,) * 2, (header,) * 2))
    (header,) = control_codec().encode(full)
    assert len(header) < MAX_HEADER - 1000
    assert control_codec().decode([header]) == (full, None)


@pytest.mark.parametrize(
    "load",
    [
        PeerLoad((StageLoad("p1", 0),) * (MAX_STAGES + 1)),
        PeerLoad((), (SchedulerLoad("p1"),) * (MAX_SCHEDULERS + 1)),
        PeerLoad(
            (),
            (SchedulerLoad("p1", requests=(RequestLoad("o", "decode", 1),) * (MAX_REQUESTS + 1)),),
        ),
        PeerLoad(
            (),
            (SchedulerLoad("p1", requests=(RequestLoad("o" * (MAX_PEER_ID + 1), "decode", 1),)),),
        ),
        PeerLoad((), (SchedulerLoad("p1", queues=(0,) * (MAX_QUEUES + 1)),)),
        PeerLoad((StageLoad("p1", 0, 101),)),
        PeerLoad((StageLoad("p1", 0, rate=-1),)),
        PeerLoad((StageLoad("p1", 0, latency_us=2**60),)),
    ],
)
def test_load_fields_are_bounded(load: PeerLoad) -> None:
    encoded = msgspec.msgpack.encode(report(load))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encoded, type=PeerReport)


def test_report_without_load_decodes() -> None:
    bare = msgspec.to_builtins(report(None))
    del bare["load"]
    assert msgspec.convert(bare, PeerReport) == report(None)
