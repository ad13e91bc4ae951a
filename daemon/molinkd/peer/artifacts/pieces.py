"""The pieces of one transfer, several under way at once."""

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import BinaryIO

from molink.errors import Unavailable
from molink.swarm.artifacts.fetch_plan import Piece
from molinkd.peer.artifacts.suppliers import Suppliers
from molinkd.peer.gate import together

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
    *,
    to_the_end: bool = False,
) -> None:
    """Have all pieces kept, ``at_once`` at a time; ``count`` is told the bytes of each.

    ``to_the_end``: if one can't be had, those that are under way still are.

    Raises as :meth:`Suppliers.read`.
    """
    waiting = iter(pieces)
    failures: list[Unavailable] = []

    async def work() -> None:
        for piece in waiting:
            if failures:
                return
            try:
                async with turn():
                    await suppliers.read(piece, partial(keep, piece))
            except Unavailable as error:
                if not to_the_end:
                    raise
                failures.append(error)
                return
            count(piece.length)

    await together(work() for _ in range(at_once))
    if failures:
        raise failures[0]


def into(file: BinaryIO) -> Keep:
    """Writes pieces to their places in a file."""
    lock = Lock()

    def write(piece: Piece, data: bytes, _sender: str) -> None:
        with lock:
            file.seek(piece.target)
            file.write(data)

    return write
