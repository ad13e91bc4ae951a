"""``molink bench``, which is imported only when it is asked for."""

from collections.abc import Sequence

import typer

_HELP = "Measure a server, or this PC."


def add_bench(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Add the real group if ``arguments`` name it, else its line in the help."""
    if "bench" in arguments:
        from molinkd.cli.bench_serve import bench_app

        app.add_typer(bench_app, name="bench")
        return
    stand_in = typer.Typer(help=_HELP)
    stand_in.callback()(_nothing)
    app.add_typer(stand_in, name="bench")


def _nothing() -> None:
    """Measure a server, or this PC."""
