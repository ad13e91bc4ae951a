"""Has prompts read by processes of their own, each piece of work within a deadline."""

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from molink.errors import BrokenModel, RequestError, WireError
from molink.text.tokenizer import Tokenizer
from molink.wire.messages.pipe import read_pipe, write_pipe
from molinkd.api.fair_queue import FairQueue, too_many
from molinkd.api.offer import Offer
from molinkd.api.prompt_messages import (
    MAX_MESSAGE,
    Answer,
    Ask,
    Fault,
    OpenModel,
    Prompts,
    ReadPrompts,
    Refusal,
)

_LOG = logging.getLogger(__name__)

#: A body up to this many bytes is short: read in milliseconds. It never waits for a long one.
SHORT_BODY = 32 * 1024
#: Seconds that a short body, a long one, and the loading of a tokenizer may take.
SHORT_S, LONG_S, OPEN_S = 2.0, 20.0, 60.0
#: Requests that may wait: short ones as many as there may be connections, and of long ones what
#: memory has room for.
MAX_SHORT, MAX_LONG = 512, 128
#: Seconds without work after which a process ends that others can stand in for: each has its own
#: copy of the tokenizers.
IDLE_S = 60.0
#: Tokenizers that a process may hold; it is started anew for more.
_MAX_TOKENIZERS = 4
#: Seconds that a process has to exit by itself.
_GRACE_S = 2.0
#: ``-P``: a folder called molinkd where the user happens to be is none of ours.
_COMMAND = (sys.executable, "-P", "-m", "molinkd.api.prompt_process")

_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class PromptReader(Protocol):
    """Makes token ids of what clients send."""

    async def read(self, owner: str, offer: Offer, body: bytes, *, chat: bool) -> Prompts:
        """What is in ``body`` (JSON of a chat, or of a completion), sent by ``owner``.

        Raises:
            RequestError: they can't be read, or not in time.
            ContextTooLong: one is so long that it can't fit.
            Overloaded: too many wait already.
        """
        ...

    async def close(self) -> None:
        """End what it has started."""
        ...


class PromptProcesses:
    """Two processes for short bodies and one for long ones, each started when it is needed."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """``options`` are further ones of ``Popen``."""
        # The first stays, so that no prompt waits for a start.
        short = [_Process(options, SHORT_S, None), _Process(options, SHORT_S, IDLE_S)]
        self._short = _Lane(short, MAX_SHORT)
        self._long = _Lane([_Process(options, LONG_S, IDLE_S)], MAX_LONG)

    async def read(self, owner: str, offer: Offer, body: bytes, *, chat: bool) -> Prompts:
        """See :class:`PromptReader`."""
        model = offer.model
        ask = ReadPrompts(
            str(model.folder), model.name, model.context, chat, body, offer.answer_format
        )
        lane = self._short if len(body) <= SHORT_BODY else self._long
        return await lane.read(owner, offer.tokenizer, ask)

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(self._short.close(), self._long.close())


class _Ended(Exception):
    """The process ended instead of answering; ``late`` if it was made to."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    ask: ReadPrompts
    tokenizer: Tokenizer
    done: asyncio.Future[Prompts]


class _Lane:
    """Some processes, and what waits for them; the first one that is free takes the next."""

    def __init__(self, processes: "Sequence[_Process]", most: int) -> None:
        self._processes = processes
        self._queue: FairQueue[_Work] = FairQueue(most)
        #: What each process is doing now.
        self._tasks: dict[_Process, asyncio.Task[None]] = {}
        self._idle: dict[_Process, asyncio.TimerHandle] = {}

    async def read(self, owner: str, tokenizer: Tokenizer, ask: ReadPrompts) -> Prompts:
        """See :class:`PromptReader`."""
        work = _Work(ask, tokenizer, asyncio.get_running_loop().create_future())
        displaced = self._queue.put(owner, work)
        if displaced is not None and not displaced.done.done():
            displaced.done.set_exception(too_many())
        self._dispatch()
        try:
            return await work.done
        finally:
            self._queue.discard(owner, work)

    async def close(self) -> None:
        """End the processes, and whatever waits for them."""
        while (work := self._queue.take()) is not None:
            work.done.cancel()
        for timer in self._idle.values():
            timer.cancel()
        tasks = list(self._tasks.values())
        for process, task in self._tasks.items():
            process.kill()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._processes))

    def _dispatch(self) -> None:
        """Give what waits to those that are free."""
        for process in self._processes:
            if process in self._tasks:
                continue
            work = self._queue.take()
            while work is not None and work.done.done():  # its client has gone
                work = self._queue.take()
            if work is None:
                return
            if (timer := self._idle.pop(process, None)) is not None:
                timer.cancel()
            self._begin(process, self._do(process, work))

    def _begin(self, process: "_Process", job: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[process] = asyncio.get_running_loop().create_task(job)

        def ended(_: object) -> None:
            del self._tasks[process]
            if not task.cancelled():
                self._dispatch()

        task.add_done_callback(ended)

    async def _do(self, process: "_Process", work: _Work) -> None:
        try:
            prompts = await process.read(work.ask, work.tokenizer)
        except asyncio.CancelledError:
            work.done.cancel()
            raise
        except Exception as error:
            if not work.done.done():
                work.done.set_exception(error)
        else:
            if not work.done.done():
                work.done.set_result(prompts)
        if process.idle_s is not None:
            loop = asyncio.get_running_loop()
            self._idle[process] = loop.call_later(process.idle_s, self._retire, process)

    def _retire(self, process: "_Process") -> None:
        """There has been no work for it for a while."""
        del self._idle[process]
        if process not in self._tasks:
            self._begin(process, process.stop())


class _Process:
    """A process that reads prompts, one at a time; started, and started again, as needed."""

    def __init__(self, options: Mapping[str, Any], deadline_s: float, idle_s: float | None) -> None:
        self.idle_s = idle_s
        self._options = options
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._late = False
        #: By folder, for which tokenizer of ours it has loaded its own.
        self._opened: dict[str, Tokenizer] = {}

    async def read(self, ask: ReadPrompts, tokenizer: Tokenizer) -> Prompts:
        """See :class:`PromptReader`."""
        for _ in range(2):  # a process that somebody has killed is no reason to fail
            try:
                await self._open(ask.folder, tokenizer)
                return await self._exchange(ask, self._deadline_s)
            except _Ended as ended:
                if ended.late:
                    text = f"it takes more than {self._deadline_s:g} s to read this prompt"
                    raise RequestError(text) from None
        raise RequestError("the model's tokenizer fails on this prompt")

    def kill(self) -> None:
        """End it in the middle of its work."""
        if self._process is not None:
            self._process.kill()

    async def stop(self) -> None:
        """See it out."""
        process, self._process = self._process, None
        self._opened.clear()
        if process is not None:
            await asyncio.to_thread(_end, process)

    async def _open(self, folder: str, tokenizer: Tokenizer) -> None:
        """See to it that it has the tokenizer."""
        if self._opened.get(folder) is tokenizer:
            return
        if len(self._opened) >= _MAX_TOKENIZERS:
            await self.stop()
        try:
            await self._exchange(OpenModel(folder), OPEN_S)
        except _Ended as ended:
            if ended.late:
                text = f"{folder}: its tokenizer takes over {OPEN_S:g} s to load"
                raise BrokenModel(text) from None
            raise
        self._opened[folder] = tokenizer

    async def _exchange(self, ask: Ask, seconds: float) -> Prompts:
        """Ask it, starting it if it isn't there; it has so many seconds.

        Raises:
            MolinkError: what it found.
            _Ended: it has ended.
        """
        if self._process is None:
            self._process = _start(self._options)
        process, self._late = self._process, False
        timer = asyncio.get_running_loop().call_later(seconds, self._expire, process)
        try:
            answer = await asyncio.to_thread(_ask, process, ask)
        finally:
            timer.cancel()
        if answer is None:
            late = ", being late" if self._late else ""
            _LOG.warning("a process that reads prompts ended%s", late)
            await self.stop()
            raise _Ended(self._late)
        if isinstance(answer, Refusal):
            raise answer.error()
        if isinstance(answer, Fault):
            raise RuntimeError(f"in the process that reads prompts: {answer.trace}")
        return answer

    def _expire(self, process: "subprocess.Popen[bytes]") -> None:
        self._late = True
        process.kill()


def _start(options: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **options,
    )


def _ask(process: "subprocess.Popen[bytes]", ask: Ask) -> Answer | None:
    """The process's answer; ``None`` if it has ended."""
    stdin, stdout = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
    try:
        write_pipe(stdin, ask, MAX_MESSAGE)
        return read_pipe(stdout, _DECODER, MAX_MESSAGE)
    except OSError:
        return None
    except WireError as error:
        _LOG.error("a process that reads prompts is no good: %s", error)
        return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """See a process out."""
    with contextlib.suppress(OSError):
        cast(BinaryIO, process.stdin).close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    cast(BinaryIO, process.stdout).close()
