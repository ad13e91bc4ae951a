"""Terminal output of a daemon in the foreground."""

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from molink.plaintext import printable
from molink.swarm.membership.sanitize import quote_name
from molink.wire.messages.instructions import PendingPairing
from molinkd.cli.pairing_prompt import PairingPrompt, TypedLines
from molinkd.cli.transfer_line import TransferLine
from molinkd.cli.translation import tr
from molinkd.peer.launch import (
    AnyDaemonEvent,
    DaemonStartedEvent,
    ModelFoundEvent,
    ModelReadinessChangedEvent,
    ModelUnavailableEvent,
    PairingsChangedEvent,
    ProblemReportedEvent,
    StageStatusChangedEvent,
    SwarmOpenedEvent,
    TransfersChangedEvent,
)


class DaemonConsole:
    """Prints a daemon's events."""

    def __init__(
        self,
        approve: Callable[[str], str] | None = None,
        *,
        foreground: bool = True,
        format_command: Callable[[str], str] = "`molink {}`".format,
    ) -> None:
        """``approve(code)`` approves a PC whose code is typed here; ``None`` disables input.

        ``foreground``: the daemon runs in this terminal. ``format_command`` is that of its
        ``Home``.
        """
        self._foreground, self._format_command = foreground, format_command
        self._pairing_prompt = (
            None if approve is None else PairingPrompt(approve, self.print_text, TypedLines())
        )
        self._console = Console(highlight=False, soft_wrap=True)
        self._shown_pairings: tuple[PendingPairing, ...] = ()
        self._transfers = TransferLine(self._console)

    def show_event(self, event: AnyDaemonEvent) -> None:
        """Print one event."""
        match event:
            case ModelFoundEvent():
                self._show_model(event)
            case DaemonStartedEvent():
                self._show_listening(event)
            case SwarmOpenedEvent():
                self._show_opened(event)
            case PairingsChangedEvent():
                self._show_pairings(event)
            case StageStatusChangedEvent():
                self._print_markup(tr("This PC: {state}", state=escape(event.text)))
            case TransfersChangedEvent():
                self._transfers.show_transfers(event.transfers)
            case ModelReadinessChangedEvent(ready=True):
                text = tr("{model} is ready.", model=escape(event.model))
                self._print_markup(f"[green]{text}[/green]")
            case ModelReadinessChangedEvent():
                text = tr(
                    "{model} is interrupted; requests wait until it is ready again.",
                    model=escape(event.model),
                )
                self._print_markup(f"[yellow]{text}[/yellow]")
            case ModelUnavailableEvent():
                model, reason = escape(event.model), escape(event.reason)
                text = tr("{model} is not available yet: {reason}", model=model, reason=reason)
                self._print_markup(f"[yellow]{text}[/yellow]")
            case ProblemReportedEvent():
                self._print_markup(f"[red]{tr('error')}: {escape(event.text)}[/red]")

    def print_text(self, text: str) -> None:
        """Print a line."""
        self._print_markup(escape(text))

    def _show_model(self, event: ModelFoundEvent) -> None:
        name = f"[bold]{escape(event.model)}[/bold]"
        if event.is_text_only:
            name = tr("{model} (text only; images are not supported)", model=name)
        if event.adapters:
            adapters = escape(", ".join(event.adapters))
            name = tr("{model} with {adapters}", model=name, adapters=adapters)
        self._print_markup(tr("Serving {model} from {path}", model=name, path=escape(event.path)))

    def _show_pairings(self, event: PairingsChangedEvent) -> None:
        """Announce new pairing requests."""
        for one in event.pairings:
            if one not in self._shown_pairings:
                name, address = escape(quote_name(one.name)), escape(one.address)
                action = tr("If that PC shows the same code, run")
                if self._pairing_prompt is not None:
                    action = tr("If that PC shows the same code, type it here, or run")
                text = tr(
                    "{pc} ({address}) wants to join with code {code}.",
                    pc=f"[bold]{name}[/bold]",
                    address=address,
                    code=f"[bold]{escape(one.code)}[/bold]",
                )
                command = escape(self._format_command(f"approve {one.code}").strip("`"))
                self._print_markup(f"\n{text} {action}\n\n  {command}\n")
        self._shown_pairings = event.pairings
        if self._pairing_prompt is not None:
            self._pairing_prompt.set_pending(pending=bool(event.pairings))

    def _show_listening(self, event: DaemonStartedEvent) -> None:
        text = tr("{pc} is in swarm {swarm}.", pc=escape(event.name), swarm=escape(event.swarm))
        ends = f" {tr('Ctrl-C stops it.')}" if self._foreground else ""
        self._print_markup(text + ends)
        self._print_markup(
            tr(
                "Chat endpoint: {url} (page: {page}; {command} prints its address for managing the "
                "swarm)",
                url=f"[bold]{event.endpoint}/v1[/bold]",
                page=f"{event.endpoint}/",
                command=escape(self._format_command("page")),
            )
        )

    def _show_opened(self, event: SwarmOpenedEvent) -> None:
        """Say how to add a PC, without a token: it would stay on the screen."""
        invite = self._format_command("invite")
        text = tr("To add a PC, {command} prints a token for it.", command=invite)
        if event.discovery:
            text = tr(
                "To add a PC, install molink there and run `molink join`: the PCs compare a code. "
                "{command} prints a token for a PC of another network.",
                command=invite,
            )
        self._print_markup(f"\n{escape(text)}\n")

    def _print_markup(self, text: str) -> None:
        self._transfers.clear_line()
        self._console.print(printable(text, keep="\n"))
