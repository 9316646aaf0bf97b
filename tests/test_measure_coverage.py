"""What `make coverage` counts: fresh data of these sources, and every module that anything here could have run."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.measure_coverage import CONTRACTS, NEEDS_SGLANG, ROOT, SOURCES, digest, fresh, left_out, of_sglang


def imports_sglang(path: Path) -> bool:
    """Whether the module imports SGLang when it is imported itself, be it through another module of the project."""
    names: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.append(node.module)
    own = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names if name.startswith("cphicache.sglang.")]
    return any(name.partition(".")[0] == "sglang" for name in names) or any(
        imports_sglang(other) for other in own if other.exists()
    )


def test_what_is_left_out_is_what_cannot_be_imported() -> None:
    """R36: without SGLang's data, exactly the modules that import SGLang are left out of the figure."""
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cphicache").rglob("*.py") if imports_sglang(path)}
    assert found == {*NEEDS_SGLANG, *CONTRACTS.values()}
    assert set(left_out([])) == found
    assert left_out(["0.5.20"]) == [CONTRACTS["0.5.23"]]
    assert left_out(CONTRACTS) == []


def test_only_data_of_these_sources_count(tmp_path: Path) -> None:
    """R36: data from inside SGLang are used while the sources are the same; older ones, and those of a run that did not end, are named."""
    source = tmp_path / "cphicache" / "module.py"
    source.parent.mkdir()
    source.write_text("x = 1\n", encoding="utf-8")
    now = digest(tmp_path)
    for version, told in (("0.5.20", now), ("0.5.23", "of other sources"), ("0.5.24", None)):
        folder = fresh(tmp_path / f"sglang-{version}")
        for name in ("data", "data.host.pid2"):
            (folder / name).write_bytes(b"")
        if told is not None:
            (folder / SOURCES).write_text(told, encoding="utf-8")
    usable, said = of_sglang(tmp_path, now)
    assert usable == {"0.5.20": [tmp_path / "sglang-0.5.20" / name for name in ("data", "data.host.pid2")]}
    assert said == [
        "sglang-0.5.23: of other sources than these; it is left out",
        "sglang-0.5.24: its run did not end; it is left out",
    ]
    source.write_text("x = 2\n", encoding="utf-8")
    assert of_sglang(tmp_path, digest(tmp_path))[0] == {}


def test_data_of_an_earlier_run_are_gone_before_the_next(tmp_path: Path) -> None:
    """R36: what a run that was interrupted left behind is not counted to the next one; what lies beside it stays."""
    (tmp_path / "sglang-0.5.20").mkdir()
    stale = fresh(tmp_path / "tests") / "data.host.pid1"
    stale.write_bytes(b"")
    assert fresh(tmp_path / "tests") == stale.parent
    assert not stale.exists()
    assert (tmp_path / "sglang-0.5.20").exists()
