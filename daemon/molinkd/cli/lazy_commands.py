"""Commands and groups that are imported only when used, to keep the command line fast."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import typer

from molinkd.cli.translation import tr

Command = Callable[..., None]

#: Name, module and function, and help line of each command, in the order of the help.
_COMMANDS = (
    ("up", "daemon_verbs:up", "Start a swarm on this PC, with a chat endpoint."),
    ("join", "daemon_verbs:join", "Add this PC to a swarm, by token or by approval."),
    ("demo", "daemon_verbs:demo", "Try a whole swarm on this PC with a small model."),
    ("chat", "swarm_verbs:chat", "Chat with a model, or ask one question."),
    ("page", "page:page", "Print the chat page's address, with the right to change the swarm."),
    (
        "status",
        "swarm_verbs:status",
        "Show the swarm's PCs, their layers, and whether it is ready.",
    ),
    ("invite", "swarm_verbs:invite", "Create a join token for another PC, or manage invitations."),
    ("approve", "join_verbs:approve", "Approve a PC that shows this code, or list waiting PCs."),
    ("revoke", "swarm_verbs:revoke", "Remove a PC from the swarm."),
    ("un-revoke", "swarm_verbs:un_revoke", "Readmit a removed PC."),
    ("add-owner", "swarm_verbs:add_owner", "Make another PC an owner, which may remove PCs too."),
    ("drain", "drain_verbs:drain", "Move this PC's layers to other PCs and free its memory."),
    ("resume", "drain_verbs:resume", "Let this PC hold layers again."),
    ("rebalance", "drain_verbs:rebalance", "Reassign all layers across the connected PCs."),
    ("down", "stop_verbs:down", "Stop molink on this PC; it stays in the swarm."),
    ("leave", "stop_verbs:leave", "Leave the swarm permanently and stop molink on this PC."),
    (
        "coordinator",
        "daemon_verbs:coordinator",
        "Run only a coordinator, without layers or an endpoint.",
    ),
    (
        "rendezvous",
        "rendezvous:rendezvous",
        "Run a server at which PCs behind routers meet.",
    ),
    ("top", "top.command:top", "Live view of the swarm: stages, links, requests, events."),
    ("ps", "served_models:ps", "List the served models, their PCs and requests."),
    ("search", "search:search", "Find models by short name, and which fit here."),
    ("run", "model_verbs:run_model", "Serve a model, wait until it is ready, and chat."),
    ("apply", "apply:apply", "Serve exactly the models in a file; safe to repeat."),
    ("pull", "model_verbs:pull", "Download a model from the Hugging Face hub."),
    ("list", "local_models:list_models", "List the models on this PC."),
    ("show", "local_models:show", "Show facts of a model on this PC."),
    ("rm", "local_models:rm", "Delete a model from this PC."),
    ("stop", "model_verbs:stop", "Unload one model, or all."),
    ("plan", "plan:plan", "Predict placement and speed; starts nothing."),
    ("doctor", "doctor.command:doctor", "Check this PC and suggest fixes."),
    ("setup", "installation.setup:setup", "Install the build of torch for this PC."),
    ("update", "installation.update:update", "Install the newest release on this PC."),
    ("uninstall", "installation.uninstall:uninstall", "Remove molink from this PC."),
    ("logs", "logs:logs", "Show this PC's logs."),
    ("simulate", "simulate:simulate_command", "Simulate a trace in virtual time."),
)

#: Name, module and object, and help line of each group.
_GROUPS = (
    (
        "config",
        "config:config_app",
        "Show settings and their sources.",
    ),
    (
        "service",
        "service.verbs:service_app",
        "Run molink automatically at startup.",
    ),
    ("bench", "bench:bench_app", "Benchmark a server, or this PC."),
)

COMMAND_NAMES = tuple(name for name, _, _ in _COMMANDS)
GROUP_NAMES = tuple(name for name, _, _ in _GROUPS)
GROUP_HELP = tuple(text for _, _, text in _GROUPS)


def load_commands(arguments: Sequence[str]) -> Iterator[tuple[str, Command, str]]:
    """Yield name, function and help line of each command.

    Those not in ``arguments`` get a placeholder as their function.
    """
    for name, where, text in _COMMANDS:
        yield name, _import_object(where) if name in arguments else _placeholder, text


def add_lazy_groups(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Add the groups; those not in ``arguments`` get a placeholder with their help line."""
    for name, where, text in _GROUPS:
        if name in arguments:
            app.add_typer(_import_object(where), name=name, help=tr(text))
        else:
            stand_in = typer.Typer(help=tr(text))
            stand_in.callback()(_placeholder)
            app.add_typer(stand_in, name=name)


def _import_object(where: str) -> Any:
    """Import ``module:name`` of this package."""
    module, name = where.split(":")
    return getattr(import_module(f"molinkd.cli.{module}"), name)


def _placeholder() -> None:
    pass
