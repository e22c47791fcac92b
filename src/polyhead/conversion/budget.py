"""The cheapest mix of layers within a budget of cache.

For each layer there is a price list: what latent attention of each size is expected to cost. Prices
of layers nearly add up, so the cheapest mix is found greedily on the lower convex hulls of the
lists: the next numbers go to the layer whose price falls most for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyhead.conversion.lossy import Latents
from polyhead.errors import InputError

_SIZES = 16
"""Steps from nothing to the whole cache of a layer."""

_ROTATED = (1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 5 / 12, 1 / 2, 2 / 3)
"""Fractions of a layer's rotated features that are tried."""


@dataclass(frozen=True)
class Offer:
    """Latent attention of one size."""

    elements: int
    price: float
    rotated: int
    size: int


def offers(latents: Latents) -> list[Offer]:
    """For each size the best split between rotated features and latent, smallest first."""
    n, G = latents.worth.shape
    whole, most = latents.elements, 2 * n * G
    splits = sorted({max(2, 2 * round(share * n * G)) for share in _ROTATED})
    prices = {rotated: latents.prices(rotated) for rotated in splits if rotated <= most}
    found = []
    for step in range(1, _SIZES + 1):
        elements = whole * step // _SIZES
        fitting = [
            Offer(elements, float(price[elements - rotated]), rotated, elements - rotated)
            for rotated, price in prices.items()
            if 1 <= elements - rotated < len(price)
        ]
        if fitting:
            found.append(min(fitting, key=lambda offer: offer.price))
    return found


def cheapest(lists: Mapping[int, Sequence[Offer]], budget: int) -> dict[int, Offer]:
    """An offer for each layer, ``budget`` numbers per token together at most.

    Raises:
        InputError: Not even the smallest offers fit.
    """
    hulls = {layer: _hull(each) for layer, each in lists.items()}
    places = dict.fromkeys(hulls, 0)
    spent = sum(hull[0].elements for hull in hulls.values())
    if spent > budget:
        raise InputError(
            f"cache: the smallest latents of all layers hold {spent:,} numbers per token: got a "
            f"budget of {budget:,}; allow a larger fraction"
        )
    steps = sorted(
        (_slope(hull[i], hull[i + 1]), layer, i)
        for layer, hull in hulls.items()
        for i in range(len(hull) - 1)
    )
    for _, layer, i in steps:  # slopes of one layer rise, so its steps come in order
        more = hulls[layer][i + 1].elements - hulls[layer][i].elements
        if places[layer] == i and spent + more <= budget:
            places[layer] += 1
            spent += more
    return {layer: hull[places[layer]] for layer, hull in hulls.items()}


def _hull(offered: Sequence[Offer]) -> list[Offer]:
    """The offers on the lower convex hull of price over size."""
    hull: list[Offer] = []
    for offer in sorted(offered, key=lambda each: each.elements):
        if hull and offer.price >= hull[-1].price:
            continue
        while len(hull) > 1 and _slope(hull[-1], offer) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(offer)
    return hull


def _slope(here: Offer, there: Offer) -> float:
    """Negative: by how much the price falls for each number."""
    return (there.price - here.price) / (there.elements - here.elements)
