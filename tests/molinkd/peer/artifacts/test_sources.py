"""Rate-limited slices of a transfer."""

import asyncio

import pytest

from molinkd.peer.artifacts.sources import SliceLimiter, run_together


async def test_slices_are_sequential_at_first() -> None:
    gate, at_once, most = SliceLimiter(0.0), 0, 0

    async def one() -> None:
        nonlocal at_once, most
        async with gate.limit_slice(gate.slice_bytes):
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1

    await run_together(one() for _ in range(3))
    assert most == 1


async def test_a_failed_slice_releases_the_next() -> None:
    gate = SliceLimiter(0.0)
    with pytest.raises(OSError, match="broken"):
        async with gate.limit_slice(gate.slice_bytes):
            raise OSError("broken")
    async with gate.limit_slice(gate.slice_bytes):
        blocked = asyncio.create_task(gate.limit_slice(gate.slice_bytes).__aenter__())
        await asyncio.sleep(0)
        assert not blocked.done()
        blocked.cancel()
        await asyncio.gather(blocked, return_exceptions=True)
    async with gate.limit_slice(gate.slice_bytes):
        pass


async def test_the_first_error_cancels_all() -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("it")

    async def failing() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await run_together([endless(), failing()])
    assert ended == ["it"]
