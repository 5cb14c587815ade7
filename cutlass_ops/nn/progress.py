"""The progress bar of long work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr over ``total`` bytes; none if stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:  # where rich before 14.3 writes an empty line, even if disabled
        yield lambda name, nbytes: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda name, nbytes: bar.advance(task, nbytes)
