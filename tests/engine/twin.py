"""A deliberately simple model of the whole cache at rest: which pages of which prefix are on the device and on the host.

One rank, room on the host for everything, every copy well: so each stored node is committed once the dust has settled. A node is named by
the text up to its end; texts are prompts, a letter a page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TwinNode:
    """``start``: pages before it. ``used``: when it was last used."""

    start: int
    used: int
    on_device: bool = True


class Twin:
    """The model."""

    def __init__(self) -> None:
        self.nodes: dict[str, TwinNode] = {}
        self.now = 0

    def path(self, text: str) -> list[str]:
        """Nodes on the way to ``text`` that it runs through whole, from the root on."""
        return sorted((end for end in self.nodes if text.startswith(end)), key=len)

    def serve(self, text: str) -> None:
        """All of the text is stored, loaded back or computed, and used now. A node is cut where the text leaves it; where the text ends
        inside of it, only if it is on the host only: then that part is loaded back, and else there is nothing new to hang below it."""
        self.now += 1
        used = self.path(text)
        end = len(used[-1]) if used else 0
        partly = next((name for name, node in self.nodes.items() if node.start == end and name[: end + 1] == text[: end + 1]), None)
        if partly is not None and end < len(text):
            shared = common(partly, text)
            if shared != text or not self.nodes[partly].on_device:
                self._cut(partly, len(shared))
                partly = shared
            used.append(partly)
            end = len(shared)
        if end < len(text):
            self.nodes[text] = TwinNode(end, self.now)
            used.append(text)
        for name in used:
            self.nodes[name] = replace(self.nodes[name], used=self.now, on_device=True)

    def _cut(self, name: str, at: int) -> None:
        """The node's head becomes one of its own."""
        node = self.nodes[name]
        self.nodes[name[:at]] = node
        self.nodes[name] = replace(node, start=at)

    def evict(self, pages: int) -> int:
        """Leaves of the device go, least recently used first, until so many pages are free. Returns how many are."""
        freed = 0
        while freed < pages:
            leaves = [name for name, node in self.nodes.items() if node.on_device and not self._device_children(name)]
            if not leaves:
                break
            name = min(leaves, key=lambda leaf: self.nodes[leaf].used)
            self.nodes[name] = replace(self.nodes[name], on_device=False)
            freed += len(name) - self.nodes[name].start
        return freed

    def _device_children(self, name: str) -> list[str]:
        return [
            other for other, node in self.nodes.items() if node.start == len(name) and other.startswith(name) and node.on_device
        ]

    def match(self, text: str) -> tuple[int, int]:
        """Pages of the text on the device, and pages after those on the host only."""
        known = self.covered(text)
        device = sum(1 for at in range(known) if self._node_of(text, at).on_device)
        return device, known - device

    def covered(self, text: str) -> int:
        """Pages of the text that are stored anywhere."""
        return max((len(common(name, text)) for name in self.nodes), default=0)

    def _node_of(self, text: str, at: int) -> TwinNode:
        return next(n for name, n in self.nodes.items() if n.start <= at < len(name) and name[: at + 1] == text[: at + 1])

    @property
    def device_pages(self) -> int:
        """Pages on the device."""
        return sum(len(name) - node.start for name, node in self.nodes.items() if node.on_device)

    @property
    def host_pages(self) -> int:
        """Pages on the host: all of them."""
        return sum(len(name) - node.start for name, node in self.nodes.items())


def common(one: str, other: str) -> str:
    """The longest common prefix."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
