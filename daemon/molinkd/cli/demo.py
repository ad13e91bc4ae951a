"""``molink demo``: run a whole swarm on this PC, until Ctrl-C or for one answer."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.status import Status
from rich.text import Text

from molink.facts.dtypes import DTypeChoice
from molink.facts.model import Quantize
from molink.plaintext import printable
from molink.wire.sockets.event_loop import EventLoop
from molinkd.peer.demo import DemoSwarm
from molinkd.peer.home import Home
from molinkd.peer.launch import (
    AnyDaemonEvent,
    DaemonEndedEvent,
    ModelFoundEvent,
    ModelReadinessChangedEvent,
    ModelUnavailableEvent,
    ProblemReportedEvent,
    StageStatusChangedEvent,
)
from molinkd.platform import until_terminated

_QUESTION = "What is molink?"
_SAMPLE_BODY = {"messages": [{"role": "user", "content": _QUESTION}], "stream": True}


class DemoConsole:
    """Prints the progress of a demo to standard error; standard output is for the answer."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._stages: dict[int, str] = {}
        self._started = False

    @contextlib.contextmanager
    def show_starting(self, peers: int) -> Iterator[None]:
        """Show a spinner on a terminal, plain lines otherwise."""
        text = f"Starting {peers} {'peer' if peers == 1 else 'peers'} on this PC"
        if not self._console.is_terminal:
            self._console.print(f"{text} …")
            yield
            self._started = True
            return
        with self._console.status(f"{text} …") as self._status:
            yield
        self._status = None
        self._started = True

    def show_event(self, number: int, event: AnyDaemonEvent) -> None:
        """Print an event of a daemon."""
        match event:
            case ModelFoundEvent():
                self._print_line(f"Model {event.model}")
            case StageStatusChangedEvent() if self._stages.get(number) != event.text:
                self._stages[number] = event.text
                self._show_progress(f"peer {number}: {event.text}")
            case ModelReadinessChangedEvent(ready=True):
                stage = self._stages.get(number, "no stage")
                self._print_line(f"peer {number}: endpoint ready, {stage}")
            case ModelReadinessChangedEvent():
                self._print_line(f"peer {number}: {event.model} is interrupted")
            case ModelUnavailableEvent() if number == 1:
                self._print_line(f"{event.model} is not available yet: {event.reason}")
            case DaemonEndedEvent() if not self._started:
                pass  # expected: start reports this error
            case ProblemReportedEvent() | DaemonEndedEvent():
                self._print_line(f"peer {number}: {event.text}")

    def show_ready(self, swarm: DemoSwarm, home: Home) -> None:
        """Print how to use the swarm."""
        urls = [f"{peer.endpoint}/v1" for peer in swarm.peers]
        self._print_line("\nThe swarm is ready. Every peer has its own endpoint:\n")
        for url in urls:
            self._print_line(f"  {url}")
        self._print_line("\nTry:\n")
        self._print_line(f"{sample_command(urls[0], home.format_command)}\n")
        page = f"{swarm.peers[0].endpoint}/"
        self._print_line(
            f"or {home.format_command('chat')}, or open {page} in a browser. Ctrl-C stops the demo."
        )

    def _show_progress(self, text: str) -> None:
        if self._status is None:
            self._print_line(text)
        else:
            self._status.update(Text(printable(text)))

    def _print_line(self, text: str) -> None:
        self._console.print(printable(text, keep="\n"), markup=False)


def sample_command(
    url: str, format_command: Callable[[str], str], platform: str = sys.platform
) -> str:
    """Return a sample command in the syntax of the platform's shell."""
    if platform == "win32":
        chat = format_command(f'chat "{_QUESTION}"')
        return f"  {chat.strip('`')}"
    return (
        f"  curl -N {url}/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(_SAMPLE_BODY)}'"
    )


def run_demo(
    home: Home,
    peers: int,
    dtype: DTypeChoice,
    model: str | None,
    question: str | None,
    quantize: Quantize = "none",
) -> int:
    """Run the demo; returns the exit code.

    Raises:
        MolinkError: it can't start.
        KeyboardInterrupt: Ctrl-C, after a clean shutdown.
    """
    console = DemoConsole()

    async def run() -> int:
        swarm = DemoSwarm(home, peers, dtype, model, console.show_event, quantize)
        with until_terminated() as stopped:
            try:
                with console.show_starting(peers):
                    await swarm.start_peers()
                if question is not None:
                    return await asyncio.to_thread(
                        _ask_question, swarm.peers[-1].endpoint, question
                    )
                console.show_ready(swarm, home)
                await stopped.wait()
                return 0
            finally:
                await swarm.close()

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(run())


def _ask_question(endpoint: str, question: str) -> int:
    from molinkd.cli.chat import run_chat

    # Greedy, so that the same question gets the same answer.
    return run_chat(f"{endpoint}/v1", question, temperature=0.0)
