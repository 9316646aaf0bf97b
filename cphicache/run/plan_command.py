"""``cphicache plan``."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from cphicache.run.failure import Failure, OneLineCommand, refuse_given
from cphicache.run.plan import DEFAULT_GB_PER_S, PRESETS, HostBudgetError, Plan, PlanError, model_shape, plan
from cphicache.transfer.budget import describe_bytes, memory_limits
from cphicache.transfer.support import COMPONENTS_BY_KIND, KV_DTYPES

_SHAPE = ("layers", "draft_layers", "latent_dim", "rope_dim", "index_dim", "indexer_layers", "kv_heads", "head_dim")


@click.command("plan", cls=OneLineCommand)
@click.option("--model", type=str, default=None, help=f"Preset. [{'|'.join(PRESETS)}]")
@click.option("--kv", "kind", type=str, default=None, help=f"Kind of KV, for a model of your own. [{'|'.join(COMPONENTS_BY_KIND)}]")
@click.option("--layers", type=int, default=None, help="Layers of the target model.")
@click.option("--draft-layers", type=int, default=None, help="Layers of the draft (MTP, EAGLE) model; 0: no draft.")
@click.option("--latent-dim", type=int, default=None, help="MLA and DSA: elements of the latent.")
@click.option("--rope-dim", type=int, default=None, help="MLA and DSA: further elements of the same item.")
@click.option("--index-dim", type=int, default=None, help="DSA: bytes of an indexer key, without its scales.")
@click.option("--indexer-layers", type=int, default=None, help="DSA: target layers with indexer keys; default all.")
@click.option("--kv-heads", type=int, default=None, help="MHA: KV heads of the model.")
@click.option("--head-dim", type=int, default=None, help="MHA: elements of a head.")
@click.option("--kv-dtype", type=str, default="bf16", show_default=True, help=f"Dtype of the KV. [{'|'.join(KV_DTYPES)}]")
@click.option("--cp-size", type=int, default=1, show_default=True, help="CP ranks: each stores its share of the tokens.")
@click.option("--tp-size", type=int, default=1, show_default=True, help="TP ranks: MHA heads are divided among them.")
@click.option("--page-size", type=int, default=64, show_default=True, help="Tokens of a page.")
@click.option("--device-gib", type=float, default=None, help="Device KV pool of one rank, GiB.")
@click.option("--device-tokens", type=int, default=None, help="Device KV pool of one rank, tokens.")
@click.option("--host-gib", type=float, default=None, help="Host budget of one rank, all payloads together, GiB.")
@click.option("--host-tokens", type=int, default=None, help="Host budget of one rank, tokens.")
@click.option("--host-ratio", type=float, default=None, help="Host budget of one rank, times its device pool.")
@click.option("--gb-per-s", type=float, default=DEFAULT_GB_PER_S, show_default=True, help="Host link, one direction, 10^9 bytes/s.")
@click.option("--check-memory", is_flag=True, help="Refuse what this machine's memory and control groups do not leave.")
@click.option("--ranks-here", type=int, default=1, show_default=True, help="With --check-memory: ranks that share this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan_command(*, model: str | None, kind: str | None, as_json: bool, check_memory: bool, **options: Any) -> None:
    """Say what fits: tokens, pages, bytes per token, seconds to fill, for a model's KV on device and host."""
    if not check_memory:
        refuse_given("ranks_here", because="is for --check-memory; give that too, or leave it out")
    shape_options = {name: options.pop(name) for name in _SHAPE}
    try:
        shape = model_shape(model, kind=kind, **shape_options)
        found = plan(model or "own", shape, limits=memory_limits() if check_memory else None, **options)
    except (PlanError, HostBudgetError) as error:
        raise Failure(str(error)) from error
    if as_json:
        import orjson

        click.echo(orjson.dumps(found.to_json(), option=orjson.OPT_INDENT_2).decode())
    else:
        Console(soft_wrap=True).print(*_tables(found), sep="\n")
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)


def _tables(found: Plan) -> tuple[str, Table, Table]:
    shape = found.shape
    layers = f"{shape.layers} layers" + (f" and {shape.draft_layers} of a draft" if shape.draft_layers else "")
    title = f"{found.model}: {shape.kind}, {layers}, {found.kv_dtype}, CP {found.cp_size}, TP {found.tp_size}, pages of {found.page_size}"
    tokens = Table("bytes of one token, one rank", "bytes", box=None, pad_edge=False)
    tokens.columns[1].justify = "right"
    for payload, components in found.component_bytes.items():
        for component, size_bytes in components.items():
            tokens.add_row(f"{payload} {component}", f"{size_bytes:,}")
    tokens.add_row("together", f"{found.token_bytes:,}")
    tokens.add_row("one page", f"{found.page_bytes:,}")
    pools = Table(
        "pool of one rank", "tokens", "pages", "GiB", "all CP ranks", f"fill at {found.gb_per_s:g} GB/s", box=None, pad_edge=False
    )
    for column in pools.columns[1:]:
        column.justify = "right"
    for name, pool in (("device", found.device), ("host", found.host)):
        pools.add_row(
            name,
            f"{pool.tokens_per_rank:,}",
            f"{pool.pages_per_rank:,}",
            describe_bytes(pool.bytes_per_rank).partition("(")[2].removesuffix(" GiB)"),
            f"{pool.tokens:,}",
            f"{pool.fill_seconds:.3f} s",
        )
    return title, tokens, pools
