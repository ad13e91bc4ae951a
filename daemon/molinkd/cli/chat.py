"""``molink chat``: a conversation in the terminal with any OpenAI-style endpoint."""

import asyncio
import importlib
import json
import re
import sys
import unicodedata
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from rich.console import Console

from molink.errors import ModelNotFound, MolinkError, RequestError, Unavailable

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
#: A path is no command, nor is a question that only begins with a slash.
_COMMAND = re.compile(r"/[A-Za-z?]+$")
#: A command of molink in a hint, where no home is known.
_FORMAT_COMMAND = "`molink {}`".format
_HELP = "/clear forgets the conversation, /exit leaves, Ctrl-C stops an answer"


@dataclass(slots=True)
class Conversation:
    """What is sent with every question. ``options`` are further fields of the request.

    ``format_command`` is the ``Home.typed`` of the home whose endpoint it is.
    """

    base_url: str
    model: str
    api_key: str | None = None
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    format_command: Callable[[str], str] = _FORMAT_COMMAND

    def clear(self) -> None:
        """Forget everything that was said."""
        self.messages.clear()

    def request_body(self) -> dict[str, Any]:
        """The request for the next answer."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*first, *self.messages]
        return {**self.options, "model": self.model, "messages": messages, "stream": True}


class EventParser:
    """Server-sent events out of bytes as they come; sans-IO."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that ``data`` completes."""
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
    format_command: Callable[[str], str] = _FORMAT_COMMAND,
) -> int:
    """Talk with the model at ``base_url`` (which ends with ``/v1``); returns an exit code.

    With ``text``, or if standard input is no terminal, prints one answer and ends. Otherwise asks
    for questions until ``/exit`` or end of input. Without ``model`` the endpoint's first one is
    taken. Errors go to standard error, as one line each.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in options.items() if value is not None}
    errors = Console(stderr=True, highlight=False)
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.read().strip()
    try:
        with asyncio.Runner() as runner:
            conversation = Conversation(
                base_url, model or "", api_key, system, options, format_command=format_command
            )
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
        raise RequestError("there is nothing to ask: give a text, or run it in a terminal", "text")
    conversation.messages.append({"role": "user", "content": text})
    runner.run(_print_answer(conversation, Console(highlight=False)))
    return 0


def _interactive(runner: asyncio.Runner, conversation: Conversation, errors: Console) -> int:
    console = Console(highlight=False)
    with suppress(ImportError):  # line editing and a history of questions, where there is one
        importlib.import_module("readline")
    model = _printable(conversation.model)
    console.print(f"{model} at {conversation.base_url}. {_HELP}.", style="dim", markup=False)
    while True:
        try:
            question = console.input("[bold cyan]you[/] › ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        match question:
            case "":
                continue
            case "/exit" | "/quit":
                return 0
            case "/clear":
                conversation.clear()
                console.print("Forgotten.", style="dim")
            case "/help" | "/?":
                console.print(_HELP, style="dim")
            case _ if _COMMAND.match(question):
                text = f"Unknown command '{_printable(question)}'. Commands: /clear, /exit"
                console.print(text, style="dim", markup=False)
            case _:
                _ask_question(runner, conversation, question, console, errors)


def _ask_question(
    runner: asyncio.Runner,
    conversation: Conversation,
    question: str,
    console: Console,
    errors: Console,
) -> None:
    """One question and its answer; if there is none, as if it hadn't been asked."""
    asked = len(conversation.messages)
    conversation.messages.append({"role": "user", "content": question})
    try:
        runner.run(_print_answer(conversation, console))
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
    except MolinkError as error:
        errors.print(f"error: {_printable(str(error))}", style="red", markup=False, soft_wrap=True)
    if len(conversation.messages) == asked + 1:
        conversation.messages.pop()


async def _print_answer(conversation: Conversation, console: Console) -> None:
    """Print the next answer as it comes, and remember it, even when it is stopped."""
    said: list[str] = []
    thinks = False
    try:
        async with aclosing(stream_answer(conversation)) as pieces:
            async for thought, piece in pieces:
                if thought and console.is_terminal:
                    thinks = True
                    console.out(_printable(thought), style="dim", end="", highlight=False)
                elif piece and thinks:
                    thinks = False
                    console.print("\n")
                said.append(piece)
                console.out(_printable(piece), end="", highlight=False)
                console.file.flush()
        console.print()
    finally:
        if text := "".join(said):
            conversation.messages.append({"role": "assistant", "content": text})


async def stream_answer(conversation: Conversation) -> AsyncGenerator[tuple[str, str], None]:
    """The next answer of ``conversation``, piece by piece: what the model thinks, and what it says.

    Raises:
        Unavailable: the endpoint can't be reached, or broke off.
        MolinkError: what it answered instead.
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
                    yield _reasoning(added), _content(added)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unreachable(conversation, error) from error
    except ValueError as error:
        raise Unavailable(f"{url} doesn't speak the OpenAI API: {error}") from error
    raise Unavailable(f"{url} broke off in the middle of its answer")


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
                raise ModelNotFound(f"{conversation.base_url} serves no model; {status} says why")
            return str(models[0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unreachable(conversation, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{url} doesn't speak the OpenAI API: {error}") from error


def _headers(conversation: Conversation) -> dict[str, str]:
    key = conversation.api_key
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    try:
        message = str(json.loads(await response.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{response.url} answered {response.status} {response.reason}"
    if response.status == 401:
        raise RequestError(f"{message} (here: `--api-key KEY`, or MOLINK_API_KEY)")
    if response.status == 404:
        raise ModelNotFound(message)
    if response.status in (429, 503):
        raise Unavailable(message)
    raise RequestError(message)


def _unreachable(conversation: Conversation, error: Exception) -> Unavailable:
    reason = str(error) or type(error).__name__
    hints = f"{conversation.format_command('status')}, {conversation.format_command('up')}"
    return Unavailable(
        f"no answer from {conversation.base_url}: {reason}; is molink running? ({hints})"
    )


def _printable(text: str) -> str:
    """``text`` without control characters: an answer must not drive the terminal."""
    if text.isprintable():
        return text
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs") else ""
        for char in text
    )
