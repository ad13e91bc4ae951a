"""The pieces of one transfer, several under way at once."""

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import BinaryIO

from molink.swarm.fetch_plan import Piece
from molinkd.peer.gate import together
from molinkd.peer.suppliers import Suppliers

#: Requests under way to one source.
IN_FLIGHT = 8

#: A context for each piece of a transfer: when it may begin, and how long it takes.
Turn = Callable[[], AbstractAsyncContextManager[None]]
#: Takes a piece, its bytes and who sent them, in a thread.
Keep = Callable[[Piece, bytes, str], None]


async def fetch_pieces(
    suppliers: Suppliers,
    pieces: Iterable[Piece],
    keep: Keep,
    count: Callable[[int], None],
    at_once: int = IN_FLIGHT,
    turn: Turn = nullcontext,
) -> None:
    """Have all pieces kept, ``at_once`` at a time; ``count`` is told the bytes of each.

    Raises as :meth:`Suppliers.read`.
    """
    waiting = iter(pieces)

    async def work() -> None:
        for piece in waiting:
            async with turn():
                await suppliers.read(piece, partial(keep, piece))
            count(piece.length)

    await together(work() for _ in range(at_once))


def into(file: BinaryIO) -> Keep:
    """Writes pieces to their places in a file."""
    lock = Lock()

    def write(piece: Piece, data: bytes, _sender: str) -> None:
        with lock:
            file.seek(piece.target)
            file.write(data)

    return write
