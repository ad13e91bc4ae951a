"""Reported transfers of model files."""

import asyncio
from contextlib import ExitStack

from molink.wire.messages.peer_reports import MAX_TRANSFERS
from molinkd.peer.artifacts.transfers import Progress, Transfers


def test_reported_transfers() -> None:
    times = [0.0]
    transfers = Transfers(lambda: times[0])
    copy, stage, waiting = Progress(total=100), Progress(), Progress(total=5)
    with (
        transfers.track_transfer("m", copy, copy=True),
        transfers.track_transfer("m", stage),
        transfers.track_transfer("m", waiting),
    ):
        waiting.prerequisite = stage
        assert [one.is_replica for one in transfers.transfer_states()] == [True]
        stage.total = 50
        stage.add_existing(20)  # existing bytes don't count as speed
        stage.add_bytes(10)
        stage.set_source("peer")
        times[0] = 2.0
        first, second = transfers.transfer_states()
        assert (first.done, first.total, first.rate, first.source) == (30, 50, 5, "peer")
        assert second.is_replica
        stage.add_bytes(20)
        assert transfers.transfer_states() == (second,)
    assert transfers.transfer_states() == ()


def test_the_number_of_reported_transfers_is_bounded() -> None:
    transfers, progress = Transfers(), Progress(total=1)
    with ExitStack() as stack:
        for _ in range(9):
            stack.enter_context(transfers.track_transfer("m", progress))
        assert len(transfers.transfer_states()) == MAX_TRANSFERS


async def test_notifications_continue_during_transfers() -> None:
    transfers, reported = Transfers(), asyncio.Queue[int]()
    watching = asyncio.create_task(
        transfers.watch_transfers(lambda: reported.put_nowait(len(transfers.transfer_states())))
    )
    with transfers.track_transfer("m", Progress(total=1)):
        assert await reported.get() == 1
    while await reported.get():
        pass
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
