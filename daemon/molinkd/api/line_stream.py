"""Streams JSON objects, one per line, that report the progress of an action."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from molinkd.api.event_stream import EventStream, find_stream_problem
from molinkd.api.problem import Envelope, Problem

NDJSON = "application/x-ndjson"


async def stream_lines(
    request: web.Request,
    lines: AsyncGenerator[bytes, None],
    stall_timeout_s: float,
    envelope: Envelope = Problem.to_json,
) -> web.StreamResponse:
    """Send ``lines``, each a JSON object without its line end; an error ends them as a last line.

    Raises:
        MolinkError: nothing was sent yet.
        ConnectionError: the client disconnected, or did not read for ``stall_timeout_s`` seconds.
    """
    stream = EventStream(request, stall_timeout_s, NDJSON)
    try:
        async with aclosing(lines):
            try:
                async for line in lines:
                    stream.push_event(line + b"\n")
                    await stream.drain_buffer()
            except Exception as error:
                if not stream.has_started or isinstance(error, ConnectionError):
                    raise
                stream.push_event(envelope(find_stream_problem(request, error)) + b"\n")
        return await stream.finish_stream()
    except BaseException:
        await stream.abort_stream()
        raise
