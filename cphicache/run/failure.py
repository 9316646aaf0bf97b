"""How a command says that its input is unusable, or its output."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from cphicache.files import whole_file
from cphicache.signals import interrupt_on_signals


class Failure(click.ClickException):
    """One line on stderr and exit status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(f"cphicache: {self.format_message()}", err=True)


@contextmanager
def one_line() -> Iterator[None]:
    """What cannot be parsed is unusable input like any other: one line, without the usage that click adds."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise Failure(error.format_message()) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a command's ``--out`` so that it is there as a whole, or as it was. Raises :class:`Failure`."""
    try:
        with whole_file(path) as file:
            file.write_bytes(content)
    except OSError as error:
        raise Failure(f"{path}: cannot be written ({error.strerror or error}); give another --out") from error


class OneLineCommand(click.Command):
    """A command whose usage errors are one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        with one_line():
            return super().parse_args(ctx, args)


class OneLineGroup(click.Group):
    """A group of such commands. An interrupt or SIGTERM, whenever it comes, ends with status 130, and with what was finished till then."""

    command_class = OneLineCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        with one_line():
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """See click."""
        with one_line():
            return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """See click."""
        try:
            with interrupt_on_signals(signal.SIGTERM):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("cphicache: interrupted", err=True)
            ctx.exit(130)
