"""The `pdserve` command: a list of programs, each with flags of its own.

`up` runs in this process. The others *become* the program they name (exec of `python -m pdserve.<room>`): so this
module imports no pool and no torch, a worker started by hand has the same command line as one started by `up`, and
signals reach it directly.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from ..engine.config import LOG_LEVELS, package_version

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Every flag, --help and --version included, belongs to the program behind the command."""

app = typer.Typer(name="pdserve", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"pdserve {package_version()}")
        raise typer.Exit


def _check_level(level: str | None) -> str | None:
    if level is not None and level not in LOG_LEVELS:
        raise typer.BadParameter(f"{level!r} is not one of {', '.join(LOG_LEVELS)}")
    return level


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_show_version)] = False,
    log_level: Annotated[
        str | None, typer.Option(metavar="|".join(LOG_LEVELS), callback=_check_level, help="of the command below")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="of the command below: one JSON object a line")] = False,
) -> None:
    """Serve large language models with prefill and decode in separate processes."""
    if context.invoked_subcommand is None:
        print(context.get_help())
    context.obj = [*(["--log-level", log_level] if log_level else []), *(["--log-json"] if log_json else [])]


def become(room: str, argv: list[str]) -> NoReturn:
    """Replace this process by `python -m pdserve.<room>`."""
    # -P: whatever folder the user stands in must not be importable
    os.execv(sys.executable, [sys.executable, "-P", "-m", f"pdserve.{room}", *argv])


@app.command(context_settings=PASS_ON)
def up(context: typer.Context) -> None:
    """Start and supervise a whole system on this machine."""
    from .up import main as up_main  # here and not above: it costs half the time of `pdserve --version`

    raise typer.Exit(up_main([*context.obj, *context.args]))


@app.command(context_settings=PASS_ON)
def gateway(context: typer.Context) -> None:
    """Run a gateway: the HTTP API, and the router over the pools."""
    become("gateway", [*context.obj, *context.args])


@app.command(context_settings=PASS_ON)
def prefill(context: typer.Context) -> None:
    """Run one prefill worker and connect it to a gateway."""
    become("prefill", [*context.obj, *context.args])


@app.command(context_settings=PASS_ON)
def decode(context: typer.Context) -> None:
    """Run one decode worker and connect it to a gateway."""
    become("decode", [*context.obj, *context.args])


@app.command()
def keys(
    what: Annotated[str, typer.Argument(metavar="DIR|api", help="a directory to make, or the word api")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="with api: whose key it will be")] = None,
) -> None:
    """Make keys: for the processes' sockets in DIR, or with `api NAME` one for a client of the HTTP API."""
    from .keygen import main as keygen_main  # here and not above: as with `up`

    raise typer.Exit(keygen_main(what, name))


@app.command(context_settings=PASS_ON)
def drain(context: typer.Context) -> None:
    """Have a worker take nothing new, and leave when nothing is left: `pdserve drain decode-0`."""
    from .drain import main as drain_main  # here and not above: as with `up`

    raise typer.Exit(drain_main(context.args))


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure a running system: `pdserve bench serve --url ...`."""
    become("bench", [*context.args, *context.obj])


def main() -> None:
    """Entry point of the `pdserve` script."""
    app(prog_name="pdserve")
