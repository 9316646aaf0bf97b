"""``cphicache plots``."""

from __future__ import annotations

from pathlib import Path

import click

from cphicache.run.failure import Failure, OneLineCommand


@click.command("plots", cls=OneLineCommand)
@click.option(
    "--results", type=click.Path(file_okay=False, path_type=Path), default=Path("out"), show_default=True, help="Where they are."
)
@click.option(
    "--to", type=click.Path(file_okay=False, path_type=Path), default=Path("docs/plots"), show_default=True, help="Folder."
)
def plots_command(*, results: Path, to: Path) -> None:
    """Draw the results of bench (bench.json) and of the studies (study-overlap.json, study-hits.json) as SVG files."""
    from cphicache.run.plots import write_plots

    try:
        written = write_plots(results, to)
    except ImportError as error:
        raise Failure(f"matplotlib is not installed here ({error.name}): pip install 'cphicache[plots]'") from error
    except ValueError as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"{to}: cannot be written ({error.strerror or error}); give another --to") from error
    for path in written:
        click.echo(path)
