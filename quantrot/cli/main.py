"""The command line. One file a command; each parses, calls the library and prints.

A `ValueError` or `OSError` is the user's to mend and becomes one message and exit status 2; anything else is a bug and
keeps its traceback. SIGTERM and SIGHUP (a terminal that is closed) end a command as Ctrl-C does, with exit status 143
or 129.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from quantrot.cli import convert, eval, inspect, learn, plan, recipes, verify
from quantrot.cli.common import Command


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM (of timeout, Slurm, docker stop) and SIGHUP raise KeyboardInterrupt, so that it keeps and clears what
    Ctrl-C does. A handler that somebody else set stays (nohup's), and only the main thread can set one."""
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    mine = [s for s in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(s) == signal.SIG_DFL]

    def interrupt(number: int, _: Any) -> None:
        came.append(number)
        for s in mine:
            signal.signal(s, signal.SIG_IGN)  # timeout sends two, and the first is being heeded
        raise KeyboardInterrupt

    for s in mine:
        signal.signal(s, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if came:
            raise typer.Exit(128 + came[0]) from None
        raise
    finally:
        for s in mine:
            signal.signal(s, signal.SIG_DFL)


class Commands(TyperGroup):
    """Turns errors that a user can mend into messages."""

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # a path may hold what the terminal's encoding does not
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            with _terminated_as_interrupted():
                return super().invoke(ctx)
        except BrokenPipeError:  # whoever read has enough; Python would say so once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except (ValueError, OSError) as error:
            for line in str(error).splitlines() or [type(error).__name__]:
                print(f"error: {line}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    help="Put a Llama model into few bits: rotate, quantize, verify, evaluate.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("convert", cls=Command)(convert.command)
app.command("plan", cls=Command)(plan.command)
app.command("learn", cls=Command)(learn.command)
app.command("verify", cls=Command)(verify.command)
app.command("inspect", cls=Command)(inspect.command)
app.add_typer(recipes.app, name="recipes")
app.add_typer(eval.app, name="eval")


def _version(show: bool) -> None:
    if show:
        from quantrot.version import __version__

        print(f"quantrot {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Put a Llama model into few bits: rotate, quantize, verify, evaluate."""
