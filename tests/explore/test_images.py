"""Packed images: small, and nothing is lost in them."""

from __future__ import annotations

from cphicache.explore.product import Product
from cphicache.run.census import take_census
from tests.explore.worlds import LOAD_BACK


def walk(product: Product) -> None:
    """Reach a few hundred states, breadth first."""
    todo = [product.first]
    seen = {product.key(product.first)}
    for state in todo:
        for move in product.moves(state):
            if len(todo) < 200 and move.state is not None and product.key(move.state) not in seen:
                seen.add(product.key(move.state))
                todo.append(move.state)


def test_what_was_packed_comes_back() -> None:
    """R20: engine, local half and driver are after a restore what they were when the state was reached, each time."""
    product = Product(LOAD_BACK, take_census)
    rank = product.ranks[0]
    images = []
    pack = rank._images.pack

    def kept(engine, local, driver):  # type: ignore[no-untyped-def]
        images.append((dict(engine) | {"counters": dict(engine["counters"])}, local, driver))
        return pack(engine, local, driver)

    rank._images.pack = kept  # type: ignore[method-assign]
    walk(product)
    assert len(images) > 200
    for number, image in enumerate(images, 1):  # the first state was packed before
        for _ in range(2):
            rank.restore(number)
            assert (rank.cache.snapshot(), rank.transfer.snapshot(), rank.driver.snapshot()) == image
            rank.driver.perform("start")  # changes what was restored, not what was packed


def test_what_recurs_is_kept_once() -> None:
    """R30: states share what they hold alike, so that millions of them fit into memory."""
    product = Product(LOAD_BACK, take_census)
    walk(product)
    rank = product.ranks[0]
    packed = [state.image for state in rank.states]
    for part in (1, 2, 3, 4):
        values = [image[part] for image in packed]
        assert len({id(value) for value in values}) == len(set(values)) < len(values)
    assert len({id(state.events) for state in rank.states}) == len({state.events for state in rank.states})
