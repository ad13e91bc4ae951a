"""Commands, and a group of them, that are imported only when they are asked for."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import typer

Command = Callable[..., None]

#: Name, module and function of each, and its line in the help.
_COMMANDS = (
    (
        "top",
        "molinkd.cli.top.command:top",
        "Watch the swarm at work: stages, links, requests, events.",
    ),
    (
        "run",
        "molinkd.cli.model_verbs:run_model",
        "Have the swarm serve a model, wait for it, and chat with it.",
    ),
    (
        "apply",
        "molinkd.cli.apply:apply",
        "Have the swarm serve the models of a file, and no others.",
    ),
    (
        "pull",
        "molinkd.cli.model_verbs:pull",
        "Fetch what is missing of a model from the Hugging Face hub.",
    ),
    (
        "list",
        "molinkd.cli.model_verbs:list_models",
        "Show the models on this PC: size, place, which is served.",
    ),
    (
        "rm",
        "molinkd.cli.model_verbs:rm",
        "Delete a model from this PC's disk.",
    ),
    (
        "stop",
        "molinkd.cli.model_verbs:stop",
        "Have the swarm serve a model no more, or none at all.",
    ),
    (
        "plan",
        "molinkd.cli.plan:plan",
        "Predict placement and times of a ring; starts nothing.",
    ),
    (
        "doctor",
        "molinkd.cli.doctor.command:doctor",
        "Look for what is wrong here, and which command mends it.",
    ),
    ("logs", "molinkd.cli.logs:logs", "Show what molink wrote down on this PC."),
    (
        "simulate",
        "molinkd.cli.simulate:simulate_command",
        "Run a trace through a ring of stages in virtual time.",
    ),
)

#: The same of each group.
_GROUPS = (
    (
        "config",
        "molinkd.cli.config:config_app",
        "Show what is set on this PC, and where each setting is from.",
    ),
    (
        "service",
        "molinkd.cli.service.verbs:service_app",
        "Keep molink running on this PC, from each start on.",
    ),
    ("bench", "molinkd.cli.bench_serve:bench_app", "Measure a server, or this PC."),
)

COMMAND_NAMES = tuple(name for name, _, _ in _COMMANDS)
GROUP_NAMES = tuple(name for name, _, _ in _GROUPS)


def add_lazy_commands(
    app: typer.Typer, arguments: Sequence[str], wrap: Callable[[Command], Command]
) -> None:
    """Add the real commands, wrapped, if ``arguments`` name them, else their lines in the help."""
    for name, where, text in _COMMANDS:
        command = _import_object(where) if name in arguments else _placeholder
        app.command(name, short_help=text)(wrap(command))


def add_lazy_groups(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Add the real groups if ``arguments`` name them, else their lines in the help."""
    for name, where, text in _GROUPS:
        if name in arguments:
            app.add_typer(_import_object(where), name=name)
        else:
            stand_in = typer.Typer(help=text)
            stand_in.callback()(_placeholder)
            app.add_typer(stand_in, name=name)


def _import_object(where: str) -> Any:
    """What a module has under a name: ``module:name``."""
    module, name = where.split(":")
    return getattr(import_module(module), name)


def _placeholder() -> None:
    """Only its line in the help is needed."""
