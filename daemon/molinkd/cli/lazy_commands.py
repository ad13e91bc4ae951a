"""Commands and groups that are imported only when used, to keep the command line fast."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import typer

Command = Callable[..., None]

#: Name, import path and help line of each command.
_COMMANDS = (
    (
        "top",
        "molinkd.cli.top.command:top",
        "Live view of the swarm: stages, links, requests, events.",
    ),
    (
        "run",
        "molinkd.cli.model_verbs:run_model",
        "Serve a model, wait until it is ready, and chat.",
    ),
    (
        "apply",
        "molinkd.cli.apply:apply",
        "Serve exactly the models in a file; safe to repeat.",
    ),
    (
        "pull",
        "molinkd.cli.model_verbs:pull",
        "Download a model from the Hugging Face hub.",
    ),
    (
        "list",
        "molinkd.cli.model_verbs:list_models",
        "List the models on this PC.",
    ),
    (
        "rm",
        "molinkd.cli.model_verbs:rm",
        "Delete a model from this PC.",
    ),
    (
        "stop",
        "molinkd.cli.model_verbs:stop",
        "Unload one model, or all.",
    ),
    (
        "plan",
        "molinkd.cli.plan:plan",
        "Predict placement and speed; starts nothing.",
    ),
    (
        "doctor",
        "molinkd.cli.doctor.command:doctor",
        "Check this PC and suggest fixes.",
    ),
    ("logs", "molinkd.cli.logs:logs", "Show this PC's logs."),
    (
        "simulate",
        "molinkd.cli.simulate:simulate_command",
        "Simulate a trace in virtual time.",
    ),
)

#: Name, import path and help line of each group.
_GROUPS = (
    (
        "config",
        "molinkd.cli.config:config_app",
        "Show settings and their sources.",
    ),
    (
        "service",
        "molinkd.cli.service.verbs:service_app",
        "Run molink automatically at startup.",
    ),
    ("bench", "molinkd.cli.bench:bench_app", "Benchmark a server, or this PC."),
)

COMMAND_NAMES = tuple(name for name, _, _ in _COMMANDS)
GROUP_NAMES = tuple(name for name, _, _ in _GROUPS)


def add_lazy_commands(
    app: typer.Typer, arguments: Sequence[str], wrap: Callable[[Command], Command]
) -> None:
    """Add the commands; those not in ``arguments`` get a placeholder with their help line."""
    for name, where, text in _COMMANDS:
        command = _import_object(where) if name in arguments else _placeholder
        app.command(name, short_help=text)(wrap(command))


def add_lazy_groups(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Add the groups; those not in ``arguments`` get a placeholder with their help line."""
    for name, where, text in _GROUPS:
        if name in arguments:
            app.add_typer(_import_object(where), name=name)
        else:
            stand_in = typer.Typer(help=text)
            stand_in.callback()(_placeholder)
            app.add_typer(stand_in, name=name)


def _import_object(where: str) -> Any:
    """Import ``module:name``."""
    module, name = where.split(":")
    return getattr(import_module(module), name)


def _placeholder() -> None:
    pass
