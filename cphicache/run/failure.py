"""How a command says that its input is unusable, or its output."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cphicache.files import whole_file
from cphicache.signals import interrupt_on_signals

MOST_CHARACTERS = 1000
"""Of a message: it repeats what was given, which may be of any length."""


def shown(text: str) -> str:
    """The text of a message as one line of bounded length: what was given begins it, and what to do ends it, so that both stay."""
    if len(text) > MOST_CHARACTERS:
        kept = MOST_CHARACTERS // 2
        text = f"{text[:kept]}... ({len(text) - 2 * kept} characters) ...{text[-kept:]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class Failure(click.ClickException):
    """One line on stderr and exit status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(f"cphicache: {shown(self.format_message())}", err=True)


@contextmanager
def one_line() -> Iterator[None]:
    """What cannot be parsed is unusable input like any other: one line, without the usage that click adds."""
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        raise Failure(error.format_message()) from error


def given_options(*names: str) -> list[str]:
    """Those of these parameters of the running command that the user has given, as they are written."""
    context = click.get_current_context()
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    return [options[name] for name in names if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)]


def refuse_given(*names: str, because: str) -> None:
    """Raise :class:`Failure` for those of these options that were given: they would be ignored."""
    if given := given_options(*names):
        raise Failure(f"{', '.join(given)}: {because}")


_NO_NAME = frozenset({errno.ENAMETOOLONG, errno.ELOOP})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


@contextmanager
def told_errors() -> Iterator[None]:
    """A standard output that takes no more, and a name that is none, are one line, too. Other errors of files are told where they are used;
    a reader that has gone is left to click, which ends as other programs do."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_NAME and error.filename is not None:
            raise Failure(f"{os.fsdecode(error.filename)}: cannot be a file ({error.strerror}); give another name") from error
        if error.filename is not None or error.errno not in _NO_ROOM:
            raise
        _drop_output()
        raise Failure(f"standard output: cannot be written ({error.strerror or error}); give room, or another place") from error


def _drop_output() -> None:
    """What standard output still holds goes nowhere: at its exit Python would try once more, and complain."""
    with suppress(OSError, ValueError):  # no file behind it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, sys.stdout.fileno())
        finally:
            os.close(nowhere)


def write_whole(path: Path, content: bytes, *, make_folder: bool = False) -> None:
    """Write a command's ``--out`` so that it is there as a whole, or as it was. Raises :class:`Failure`."""
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
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
    """A group of such commands, which say in one line that standard output cannot be written, too. An interrupt or SIGTERM, whenever it
    comes, ends with status 130, and with what was finished till then."""

    command_class = OneLineCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See click."""
        with one_line(), told_errors():
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """See click."""
        with one_line():
            return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """See click."""
        try:
            with interrupt_on_signals(signal.SIGTERM), told_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("cphicache: interrupted", err=True)
            ctx.exit(130)
