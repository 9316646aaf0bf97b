"""How a command says that its input is unusable."""

from __future__ import annotations

from typing import Any

import click


class Failure(click.ClickException):
    """One line on stderr and exit status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(f"cphicache: {self.format_message()}", err=True)
