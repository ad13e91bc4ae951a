"""``python -m tests.support.lying_relay`` is ``molink`` on a PC that relays dishonestly.

It passes probes, and the first bytes of each connection, so that it seems to be a good relay. The
variable ``LIE`` says what it does with the rest: ``hold`` it, let it ``trickle``, or ``cut`` the
connection.
"""

import asyncio
import os

from molinkd.cli.main import main
from molinkd.peer.membership import relay_server
from molinkd.splice import CHUNK_BYTES, Stream
from molinkd.tasks import cancel_tasks

#: Bytes that it passes each way: enough for handshakes and to form a ring.
HONEST = 12_000
#: Bytes per second of a trickle: less than the signs of life of a connection.
TRICKLE = 20


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    passed = 0
    while data := await reader.read(CHUNK_BYTES):
        if passed >= HONEST and os.environ["LIE"] == "cut":
            return
        if passed < HONEST:
            writer.write(data)
        elif os.environ["LIE"] == "trickle":
            writer.write(data[:TRICKLE])
            await asyncio.sleep(1.0)
        passed += len(data)


async def splice(one: Stream, other: Stream, _: object) -> None:
    """Join two ends of a relay, for a while."""
    ways = [
        asyncio.ensure_future(_copy(one[0], other[1])),
        asyncio.ensure_future(_copy(other[0], one[1])),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_tasks(*ways)
        other[1].transport.abort()


if __name__ == "__main__":
    relay_server.splice_streams = splice  # type: ignore[assignment]
    main()
