"""What several commands share: argument types, size arithmetic, consoles, progress bars."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from quantrot.process import Progress, size

if TYPE_CHECKING:
    from quantrot.calibration import Calibration

Model = Annotated[str, typer.Argument(help="A directory, a hub id, or demo.", metavar="MODEL")]
Recipe = Annotated[str, typer.Option("--recipe", "-r", help="A shipped name (see `quantrot recipes`) or a YAML file.")]
Device = Annotated[str, typer.Option(help="Where the arithmetic runs: cpu, cuda, cuda:N.")]
ShardSize = Annotated[
    str, typer.Option("--max-shard-size", help="Largest output file, unless one tensor is larger: 5GB, 500MB.")
]
Texts = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration", help="UTF-8 text that `rounding: gptq` calibrates on; the windows of several take turns."
    ),
]
Windows = Annotated[int | None, typer.Option("--windows", help="Windows of --calibration's text; 32 by default.")]
SeqLen = Annotated[int | None, typer.Option("--seq-len", help="Tokens in one of them; 512 by default.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Chunks at a time; all CPUs by default.")]


class Command(TyperCommand):
    """Refuses an option of one value that is given twice, of which the parser takes the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = list(args)  # parsing empties it
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            _, _, given = self.make_parser(ctx).parse_args(words)
            for param in given:
                single = isinstance(param, TyperOption) and not (param.multiple or param.is_flag)
                if single and given.count(param) > 1:
                    raise ValueError(f"{param.opts[0]} is given {given.count(param)} times; give it once")
        return rest


UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of 5GB, 500MB, 1GiB or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    nbytes = float(match[1]) * UNITS.get(match[2].upper(), 0) if match else 0
    if not 1 <= nbytes < 1 << 63:
        raise ValueError(f"max-shard-size is {text!r:.80}; write a size such as 5GB, 500MB or 1GiB")
    return int(nbytes)


def calibration(texts: list[Path] | None, windows: int | None, seq_len: int | None) -> "Calibration | None":
    """What a conversion is calibrated on; None without a text."""
    asked = {name: value for name, value in (("windows", windows), ("seq_len", seq_len)) if value is not None}
    if not texts:
        for name, value in asked.items():
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: {value} of no text; give --calibration TEXT, or leave {option} out")
        return None
    from quantrot.calibration import Calibration
    from quantrot.evals.text import evaluation_text

    return Calibration(tuple(evaluation_text(text)[0] for text in texts), names=tuple(map(str, texts)), **asked)


def console(stderr: bool = False) -> Any:
    """A rich console; a pipe or a file gets 120 columns instead of rich's 80."""
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            """rich's own exits with 1, which of `verify` means that the output is not acceptable."""
            raise BrokenPipeError

    made = Piped(stderr=stderr, highlight=False)
    return made if made.is_terminal else Piped(stderr=stderr, highlight=False, width=120)


@contextmanager
def byte_progress() -> Iterator[Progress]:
    """A bar on stderr with bytes, rate and time left; yields progress(current, done, total)."""
    from rich import progress

    width = console(stderr=True).width  # of 80 columns a longer name would take two lines
    letters = min(44, width // 3)
    name = progress.TextColumn(f"{{task.description:<{letters}.{letters}}}")
    speed = [progress.TransferSpeedColumn()] if width >= 100 else []
    columns = (name, progress.BarColumn(), progress.DownloadColumn(), *speed, progress.TimeRemainingColumn())
    with _bars(columns, size) as show:
        yield show


@contextmanager
def count_progress() -> Iterator[Progress]:
    """A bar on stderr that counts; yields progress(what, done, total)."""
    from rich import progress

    columns = progress.TextColumn("{task.description:<12}"), progress.BarColumn(), progress.MofNCompleteColumn()
    with _bars((*columns, progress.TimeElapsedColumn(), progress.TimeRemainingColumn()), str) as show:
        yield show


@contextmanager
def _bars(columns: tuple[Any, ...], number: Callable[[int], str]) -> Iterator[Progress]:
    """One bar on stderr, which appears with the first progress: an error before it is not preceded by an empty bar.
    Where stderr is a file or a pipe, lines."""
    from rich import progress

    where = console(stderr=True)
    if not where.is_terminal:
        yield _tenths(number)
        return
    bars = progress.Progress(*columns, console=where)
    task = bars.add_task("", total=None)

    def show(name: str, done: int, total: int) -> None:
        bars.start()
        bars.update(task, description=name, completed=done, total=total)

    try:
        yield show
    finally:
        if bars.live.is_started:  # else it would print an empty line
            bars.stop()


def _tenths(number: Callable[[int], str]) -> Progress:
    """Prints a line with the time at every tenth."""
    started, last, whole = time.monotonic(), 0, 0

    def show(name: str, done: int, total: int) -> None:
        nonlocal last, whole
        tenth = done * 10 // max(total, 1)
        if (tenth, total) != (last, whole) and tenth:
            note(f"{name}: {number(done)}/{number(total)} after {time.monotonic() - started:.0f} s")
        last, whole = tenth, total

    return show


def note(text: str) -> None:
    """A remark, on stderr and in one line."""
    console(stderr=True).print(text, markup=False, soft_wrap=True)


def line(text: str) -> None:
    """A line of a result, on stdout; however long, one line."""
    console().print(text, markup=False, soft_wrap=True)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A result with a line above it: a table's own title is wrapped at the table's width."""
    line(title)
    console().print(grid(columns, rows))


def grid(columns: list[str], rows: list[list[str]]) -> Any:
    """A table; columns of numbers are flush right. Brackets are text: a path may have them."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = any(columns)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=shown)
    for i, column in enumerate(columns):
        numbers = all(re.fullmatch(r"[-+]?[\d.,]*", row[i]) for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
