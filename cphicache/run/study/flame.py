"""Draws a flame graph: a profile in speedscope's evented form, with calls of one stack added together, as an SVG of boxes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import PurePath
from typing import Any, NamedTuple

WIDTH, ROW, LETTER, EDGE = 1200, 17, 6.3, 4
"""Pixels: of the whole, of a row, of a letter, of the margin."""
LEAST = 0.002
"""Boxes of a smaller share are left out."""


class Box(NamedTuple):
    """One call: seconds at which it begins and ends, calls around it, function and file."""

    begin: float
    end: float
    depth: int
    function: str
    file: str


def boxes_of(profile: Mapping[str, Any]) -> list[Box]:
    """The calls of the first profile of a speedscope document, outer ones first. ValueError for calls that do not close in order."""
    frames, open_calls, found = profile["shared"]["frames"], [], []
    for event in profile["profiles"][0]["events"]:
        if event["type"] == "O":
            open_calls.append((event["frame"], event["at"]))
            continue
        if not open_calls or open_calls[-1][0] != event["frame"]:
            raise ValueError(f"profile: frame {event['frame']} closes at {event['at']} and is not the innermost open one")
        frame, begin = open_calls.pop()
        where = frames[frame]
        found.append(Box(begin, event["at"], len(open_calls), where["name"], where.get("file") or ""))
    return sorted(found, key=lambda box: (box.depth, box.begin))


def draw(profile: Mapping[str, Any], title: str) -> str:
    """The SVG: a box's width is its share of the whole time, what it calls is below it, its colour is its package."""
    boxes = boxes_of(profile)
    total = max((box.end for box in boxes), default=0.0) or 1.0
    seen = [box for box in boxes if box.end - box.begin >= LEAST * total]
    scale = (WIDTH - 2 * EDGE) / total
    height = (max((box.depth for box in seen), default=0) + 4) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="monospace" font-size="10.5">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{EDGE}" y="{ROW - 4}">{escape(title)}: {total:.2f} s, width is time, callers above; colours are packages</text>',
    ]
    x = float(EDGE)
    packages = dict.fromkeys(_package(box.file) for box in seen)
    colours = {package: f"hsl({220 + place * 138 % 360},65%,78%)" for place, package in enumerate(packages)}  # far from each other
    for package, colour in colours.items():
        parts.append(f'<rect x="{x:.1f}" y="{ROW}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14:.1f}" y="{ROW + 9}">{escape(package)}</text>')
        x += 24 + LETTER * len(package)
    for box in seen:
        x, width = EDGE + box.begin * scale, (box.end - box.begin) * scale
        y = (box.depth + 2.5) * ROW
        package = _package(box.file)
        share = f"{(box.end - box.begin) / total:.1%}"
        letters = int((width - 4) / LETTER)
        text = box.function if len(box.function) <= letters else box.function[: max(0, letters - 1)] + "…" if letters > 3 else ""
        parts.append(
            f'<g><title>{escape(f"{package} {box.function}: {share}")}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{ROW - 1}" fill="{colours[package]}"/><text x="{x + 2:.1f}" y="{y + 12:.1f}">{escape(text)}</text></g>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _package(file: str) -> str:
    """``engine`` of ``.../cphicache/engine/steps.py``; ``python`` elsewhere."""
    parts = PurePath(file).parts
    if "cphicache" not in parts:
        return "python"
    inside = parts[len(parts) - parts[::-1].index("cphicache") :]
    return inside[0] if inside else "python"
