"""``molink chat``: a conversation in the terminal with any OpenAI-compatible endpoint."""

import asyncio
import importlib
import json
import sys
import time
import unicodedata
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from molink.errors import ModelNotFound, MolinkError, RequestError, Unavailable, UsageError
from molinkd.cli.conversation import FORMAT_COMMAND, QUOTES, Conversation, run_command
from molinkd.cli.translation import tr
from molinkd.cli.word_wrapper import WordWrapper

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)


class EventParser:
    """Parses server-sent events from chunks of bytes; sans-IO."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads of the events that ``data`` completes."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [line[5:].strip() for line in map(bytes.rstrip, lines) if line.startswith(b"data:")]


def run_chat(
    base_url: str,
    text: str | None = None,
    model: str | None = None,
    api_key: str | None = None,
    *,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    images: Sequence[Path] = (),
    format_command: Callable[[str], str] = FORMAT_COMMAND,
) -> int:
    """Chat with the model at ``base_url`` (which ends with ``/v1``); returns an exit code.

    With ``text``, or if standard input is not a terminal, prints one answer. Otherwise prompts
    until ``/exit`` or end of input. ``model`` defaults to the endpoint's first; the first question
    goes with ``images``. Errors are printed to standard error.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in options.items() if value is not None}
    errors = Console(stderr=True, highlight=False)
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.read().strip()
    try:
        with asyncio.Runner() as runner:
            conversation = Conversation(
                base_url, model or "", api_key, system, options, [], format_command
            )
            for path in images:
                conversation.attach_image(path)
            conversation.model = model or runner.run(_first_model(conversation))
            if text is not None:
                return _one_shot(runner, conversation, text)
            return _interactive(runner, conversation, errors)
    except MolinkError as error:
        errors.print(f"error: {_printable(str(error))}", style="red", markup=False, soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _one_shot(runner: asyncio.Runner, conversation: Conversation, text: str) -> int:
    if not text:
        raise UsageError("nothing to ask: pass a text, or run it in a terminal")
    conversation.add_question(text)
    runner.run(_print_answer(conversation, Console(highlight=False)))
    return 0


def _interactive(runner: asyncio.Runner, conversation: Conversation, errors: Console) -> int:
    console = Console(highlight=False)
    with suppress(ImportError):  # line editing and history, if available
        importlib.import_module("readline")
    about = tr(
        "{model} at {url}. /help lists the commands, /bye quits.",
        model=_printable(conversation.model),
        url=conversation.base_url,
    )
    console.print(about, style="dim", markup=False)
    while True:
        try:
            question, is_quoted = _read_question(console)
            shown = None if is_quoted else run_command(conversation, question)
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        except UsageError as error:
            shown = str(error)
        if shown is None and question:
            _ask_question(runner, conversation, question, console, errors)
        elif shown:
            console.print(_printable(shown), style="dim", markup=False, soft_wrap=True)


def _read_question(console: Console) -> tuple[str, bool]:
    """Read a line, or the lines between two :data:`QUOTES`; says whether they were quoted."""
    text = console.input(f"[bold cyan]{tr('you')}[/] › ").strip()
    if not text.startswith(QUOTES):
        return text, False
    text = text.removeprefix(QUOTES)
    while not text.endswith(QUOTES):
        text += "\n" + console.input("[dim]...[/] ").rstrip()
    return text.removesuffix(QUOTES).strip(), True


def _ask_question(
    runner: asyncio.Runner,
    conversation: Conversation,
    question: str,
    console: Console,
    errors: Console,
) -> None:
    """Ask one question; without an answer it is dropped, with its images."""
    asked = len(conversation.messages)
    conversation.add_question(question)
    try:
        runner.run(_print_answer(conversation, console))
    except KeyboardInterrupt:
        console.print(f"\n({tr('stopped')})", style="dim")
    except MolinkError as error:
        errors.print(f"error: {_printable(str(error))}", style="red", markup=False, soft_wrap=True)
    if len(conversation.messages) == asked + 1:
        conversation.messages.pop()


async def _print_answer(conversation: Conversation, console: Console) -> None:
    """Stream the next answer to the console and keep it, even if it is stopped."""
    answer: list[str] = []
    out = _AnswerPrinter(console)
    began, first = time.monotonic(), 0.0
    try:
        try:
            async with aclosing(stream_answer(conversation)) as pieces:
                async for thought, piece in pieces:
                    first = first or time.monotonic()
                    out.print_thought(_printable(thought))
                    answer.append(piece)
                    out.print_text(_printable(piece))
        finally:
            out.flush()
        console.print()
        if conversation.is_verbose:
            text = _describe_usage(conversation.usage, first - began, time.monotonic() - first)
            console.print(text, style="dim", markup=False)
    finally:
        if text := "".join(answer):
            conversation.messages.append({"role": "assistant", "content": text})


class _AnswerPrinter:
    """Prints an answer as it comes; in a terminal with its reasoning, and broken between words."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._wrapper: WordWrapper | None = None
        self._thinks = False

    def print_thought(self, text: str) -> None:
        """Print a piece of reasoning."""
        if text and self._console.is_terminal:
            self._thinks = True
            self._print(text)

    def print_text(self, text: str) -> None:
        """Print a piece of the answer."""
        if text and self._thinks:
            self.flush()
            self._thinks = False
            self._console.print("\n")
        self._print(text)

    def flush(self) -> None:
        """Print what has been held back."""
        if self._wrapper is not None:
            self._out(self._wrapper.flush())
            self._wrapper = None

    def _print(self, text: str) -> None:
        if self._console.is_terminal:
            # Old consoles of Windows begin a line as soon as one is full.
            self._wrapper = self._wrapper or WordWrapper(self._console.width - 1)
            text = self._wrapper.wrap(text)
        self._out(text)

    def _out(self, text: str) -> None:
        style = "dim" if self._thinks else None
        self._console.out(text, style=style, end="", highlight=False)
        self._console.file.flush()


def _describe_usage(usage: dict[str, int], first_s: float, answer_s: float) -> str:
    """Describe an answer's tokens, the seconds to the first one, and those of the others."""
    prompt, tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    rate = f", {(tokens - 1) / answer_s:.1f} tokens/s" if tokens > 1 and answer_s > 0 else ""
    return f"{prompt} prompt tokens, first token in {first_s:.2f} s, {tokens} tokens{rate}"


async def stream_answer(conversation: Conversation) -> AsyncGenerator[tuple[str, str], None]:
    """Stream the next answer as (reasoning, content) pieces.

    Raises:
        Unavailable: the endpoint is unreachable, or the connection was lost.
        MolinkError: the endpoint's error.
    """
    url = f"{conversation.base_url.rstrip('/')}/chat/completions"
    parser = EventParser()
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, headers=_headers(conversation)) as session,
            session.post(url, json=conversation.request_body()) as response,
        ):
            await _check_status(response)
            async for data in response.content.iter_any():
                for event in parser.feed(data):
                    if event == b"[DONE]":
                        return
                    added = json.loads(event)
                    conversation.usage = added.get("usage") or {}
                    yield _reasoning(added), _content(added)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unreachable(conversation, error) from error
    except ValueError as error:
        raise Unavailable(f"{url} is not an OpenAI-compatible API: {error}") from error
    raise Unavailable(f"{url} closed the connection before the answer was complete")


def _content(event: dict[str, Any]) -> str:
    if "error" in event:
        raise Unavailable(str(event["error"].get("message", "the answer failed")))
    return _delta(event).get("content") or ""


def _reasoning(event: dict[str, Any]) -> str:
    return _delta(event).get("reasoning_content") or ""


def _delta(event: dict[str, Any]) -> dict[str, Any]:
    choices = event.get("choices") or [{}]
    delta: dict[str, Any] = choices[0].get("delta", {})
    return delta


async def _first_model(conversation: Conversation) -> str:
    url = f"{conversation.base_url.rstrip('/')}/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=_TIMEOUT, headers=_headers(conversation)) as session,
            session.get(url) as response,
        ):
            await _check_status(response)
            models = json.loads(await response.read())["data"]
            if not models:
                status = conversation.format_command("status")
                raise ModelNotFound(f"{conversation.base_url} serves no model; {status} shows why")
            return str(models[0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unreachable(conversation, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{url} is not an OpenAI-compatible API: {error}") from error


def _headers(conversation: Conversation) -> dict[str, str]:
    key = conversation.api_key
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    try:
        message = str(json.loads(await response.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.url} returned {response.status} {response.reason}"
    if response.status == 401:
        raise RequestError(f"{message} (use `--api-key KEY` or MOLINK_API_KEY)")
    if response.status == 404:
        raise ModelNotFound(message)
    if response.status in (429, 503):
        raise Unavailable(message)
    raise RequestError(message)


def _unreachable(conversation: Conversation, error: Exception) -> Unavailable:
    reason = str(error) or type(error).__name__
    hints = f"{conversation.format_command('status')}, {conversation.format_command('up')}"
    return Unavailable(
        f"no response from {conversation.base_url}: {reason}; is molink running? ({hints})"
    )


def _printable(text: str) -> str:
    """Remove control characters, so that an answer can't control the terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") else ""
        for char in text
    )
