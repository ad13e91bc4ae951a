"""Tokenizes prompts in worker processes with timeouts."""

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
from molink.wire.messages.worker_pipe import read_pipe, write_pipe
from molinkd.api.fair_queue import FairQueue, queue_full_error
from molinkd.api.model_catalog import LoadedModel
from molinkd.api.openai.schema import ChatBody
from molinkd.api.prompt_worker_messages import (
    MAX_MESSAGE_BYTES,
    LoadTokenizer,
    PromptBody,
    PromptRefusal,
    PromptWorkerFault,
    PromptWorkerReply,
    PromptWorkerRequest,
    TokenizedPrompts,
    TokenizePrompts,
)

_LOG = logging.getLogger(__name__)

#: Bodies up to this size are short: tokenized in milliseconds, and never queued behind long ones.
SHORT_BODY_BYTES = 32 * 1024
#: Timeouts in seconds: short bodies, long bodies, loading a tokenizer.
SHORT_S, LONG_S, OPEN_S = 2.0, 20.0, 60.0
#: Maximum queue lengths: short bodies up to the connection limit, long ones limited by memory.
MAX_SHORT, MAX_LONG = 512, 128
#: Idle seconds after which extra workers exit; each has its own copy of the tokenizers.
IDLE_TIMEOUT_S = 60.0
#: Maximum tokenizers per worker; it is restarted to load more.
_MAX_TOKENIZERS = 4
#: Seconds that a worker has to exit by itself.
_EXIT_TIMEOUT_S = 2.0
#: ``-P``: never import a folder named molinkd from the working directory.
_COMMAND = (sys.executable, "-P", "-m", "molinkd.api.prompt_worker")

_DECODER: msgspec.msgpack.Decoder[PromptWorkerReply] = msgspec.msgpack.Decoder(PromptWorkerReply)


class PromptTokenizer(Protocol):
    """Tokenizes prompts of clients."""

    async def tokenize_prompts(
        self, client: str, loaded_model: LoadedModel, body: PromptBody
    ) -> TokenizedPrompts:
        """Tokenize the prompts of ``body``, sent by ``client``.

        Raises:
            RequestError: the prompts are invalid, or take too long.
            ContextTooLong: a prompt can't fit the context.
            Overloaded: the queue is full.
        """
        ...

    async def close(self) -> None:
        """Stop all workers."""
        ...


class PromptWorkers:
    """Two workers for short bodies and one for long ones, started on demand."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """``options`` are extra arguments of ``Popen``."""
        # The first worker stays, so that no prompt waits for a start.
        short = [
            _PromptWorker(options, SHORT_S, None),
            _PromptWorker(options, SHORT_S, IDLE_TIMEOUT_S),
        ]
        self._short = _WorkerPool(short, MAX_SHORT)
        self._long = _WorkerPool([_PromptWorker(options, LONG_S, IDLE_TIMEOUT_S)], MAX_LONG)

    async def tokenize_prompts(
        self, client: str, loaded_model: LoadedModel, body: PromptBody
    ) -> TokenizedPrompts:
        """See :class:`PromptTokenizer`."""
        request = TokenizePrompts.from_body(body, loaded_model)
        is_short = len(request.body) <= SHORT_BODY_BYTES
        # A few bytes may decode to millions of pixels.
        sees = isinstance(body, ChatBody) and body.has_images
        pool = self._short if is_short and not sees else self._long
        return await pool.submit_prompt(client, loaded_model.tokenizer, request)

    async def close(self) -> None:
        """Stop the workers."""
        await asyncio.gather(self._short.close(), self._long.close())


class _WorkerExitedError(Exception):
    """The worker exited instead of answering; ``timed_out`` if it was killed."""

    def __init__(self, timed_out: bool) -> None:
        super().__init__()
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True, eq=False)
class _QueuedPrompt:
    request: TokenizePrompts
    tokenizer: Tokenizer
    result: asyncio.Future[TokenizedPrompts]


class _WorkerPool:
    """Workers with a shared queue; the next free worker takes the next prompt."""

    def __init__(self, processes: "Sequence[_PromptWorker]", max_queue_len: int) -> None:
        self._processes = processes
        self._queue: FairQueue[_QueuedPrompt] = FairQueue(max_queue_len)
        #: The running task of each busy worker.
        self._tasks: dict[_PromptWorker, asyncio.Task[None]] = {}
        self._idle: dict[_PromptWorker, asyncio.TimerHandle] = {}

    async def submit_prompt(
        self, client: str, tokenizer: Tokenizer, request: TokenizePrompts
    ) -> TokenizedPrompts:
        """See :class:`PromptTokenizer`."""
        prompt = _QueuedPrompt(request, tokenizer, asyncio.get_running_loop().create_future())
        displaced = self._queue.add_item(client, prompt)
        if displaced is not None and not displaced.result.done():
            displaced.result.set_exception(queue_full_error())
        self._dispatch()
        try:
            return await prompt.result
        finally:
            self._queue.discard_item(client, prompt)

    async def close(self) -> None:
        """Stop the workers and cancel queued prompts."""
        while (prompt := self._queue.pop_item()) is not None:
            prompt.result.cancel()
        for timer in self._idle.values():
            timer.cancel()
        tasks = list(self._tasks.values())
        for process, task in self._tasks.items():
            process.kill_process()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(process.stop_process() for process in self._processes))

    def _dispatch(self) -> None:
        """Assign queued prompts to free workers."""
        for process in self._processes:
            if process in self._tasks:
                continue
            prompt = self._queue.pop_item()
            while prompt is not None and prompt.result.done():  # its client disconnected
                prompt = self._queue.pop_item()
            if prompt is None:
                return
            if (timer := self._idle.pop(process, None)) is not None:
                timer.cancel()
            self._start_task(process, self._run_prompt(process, prompt))

    def _start_task(self, process: "_PromptWorker", job: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[process] = asyncio.get_running_loop().create_task(job)

        def ended(_: object) -> None:
            del self._tasks[process]
            if not task.cancelled():
                self._dispatch()

        task.add_done_callback(ended)

    async def _run_prompt(self, process: "_PromptWorker", prompt: _QueuedPrompt) -> None:
        try:
            prompts = await process.tokenize_prompts(prompt.request, prompt.tokenizer)
        except asyncio.CancelledError:
            prompt.result.cancel()
            raise
        except Exception as error:
            if not prompt.result.done():
                prompt.result.set_exception(error)
        else:
            if not prompt.result.done():
                prompt.result.set_result(prompts)
        if process.idle_s is not None:
            loop = asyncio.get_running_loop()
            self._idle[process] = loop.call_later(process.idle_s, self._stop_idle, process)

    def _stop_idle(self, process: "_PromptWorker") -> None:
        """Stop a worker that was idle for a while."""
        del self._idle[process]
        if process not in self._tasks:
            self._start_task(process, process.stop_process())


class _PromptWorker:
    """A worker process with one prompt at a time; restarted as needed."""

    def __init__(self, options: Mapping[str, Any], deadline_s: float, idle_s: float | None) -> None:
        self.idle_s = idle_s
        self._options = options
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._timed_out = False
        #: The tokenizer loaded for each folder; a reloaded one is loaded again in the worker.
        self._tokenizers: dict[str, Tokenizer] = {}

    async def tokenize_prompts(
        self, request: TokenizePrompts, tokenizer: Tokenizer
    ) -> TokenizedPrompts:
        """See :class:`PromptTokenizer`."""
        for _ in range(2):  # retry once if the process was killed from outside
            try:
                await self._load_tokenizer(request.folder, tokenizer)
                return await self._exchange(request, self._deadline_s)
            except _WorkerExitedError as ended:
                if ended.timed_out:
                    text = f"tokenizing this prompt takes more than {self._deadline_s:g} s"
                    raise RequestError(text) from None
        raise RequestError("the model's tokenizer fails on this prompt")

    def kill_process(self) -> None:
        """Kill the process, also while it works."""
        if self._process is not None:
            self._process.kill()

    async def stop_process(self) -> None:
        """Let the process exit."""
        process, self._process = self._process, None
        self._tokenizers.clear()
        if process is not None:
            await asyncio.to_thread(_stop_process, process)

    async def _load_tokenizer(self, folder: str, tokenizer: Tokenizer) -> None:
        """Load the tokenizer in the worker unless it has it."""
        if self._tokenizers.get(folder) is tokenizer:
            return
        if len(self._tokenizers) >= _MAX_TOKENIZERS:
            await self.stop_process()
        try:
            await self._exchange(LoadTokenizer(folder), OPEN_S)
        except _WorkerExitedError as ended:
            if ended.timed_out:
                text = f"{folder}: loading the tokenizer takes more than {OPEN_S:g} s"
                raise BrokenModel(text) from None
            raise
        self._tokenizers[folder] = tokenizer

    async def _exchange(self, request: PromptWorkerRequest, seconds: float) -> TokenizedPrompts:
        """Send a request and wait up to ``seconds``, starting the process if needed.

        Raises:
            MolinkError: the error that the worker reports.
            _WorkerExitedError: the process exited.
        """
        if self._process is None:
            self._process = _start_process(self._options)
        process, self._timed_out = self._process, False
        timer = asyncio.get_running_loop().call_later(seconds, self._kill_late, process)
        try:
            answer = await asyncio.to_thread(_send_request, process, request)
        finally:
            timer.cancel()
        if answer is None:
            timed_out = " after a timeout" if self._timed_out else ""
            _LOG.warning("a prompt worker exited%s", timed_out)
            await self.stop_process()
            raise _WorkerExitedError(self._timed_out)
        if isinstance(answer, PromptRefusal):
            raise answer.to_error()
        if isinstance(answer, PromptWorkerFault):
            raise RuntimeError(f"in a prompt worker: {answer.trace}")
        return answer

    def _kill_late(self, process: "subprocess.Popen[bytes]") -> None:
        self._timed_out = True
        process.kill()


def _start_process(options: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **options,
    )


def _send_request(
    process: "subprocess.Popen[bytes]", request: PromptWorkerRequest
) -> PromptWorkerReply | None:
    """Return the worker's reply; ``None`` if it exited."""
    stdin, stdout = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
    try:
        write_pipe(stdin, request, MAX_MESSAGE_BYTES)
        return read_pipe(stdout, _DECODER, MAX_MESSAGE_BYTES)
    except OSError:
        return None
    except WireError as error:
        _LOG.error("a prompt worker sent an invalid message: %s", error)
        return None


def _stop_process(process: "subprocess.Popen[bytes]") -> None:
    """Close the pipes and wait for the exit, or kill the process."""
    with contextlib.suppress(OSError):
        cast(BinaryIO, process.stdin).close()
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    cast(BinaryIO, process.stdout).close()
