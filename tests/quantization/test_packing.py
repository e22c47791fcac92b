"""What is packed is unpacked by the gguf package to numbers near to those given."""

from __future__ import annotations

import pytest
import torch

from polyhead.quantization import block_type, pack, packable
from polyhead.quantization.packing import _symmetric
from random_blocks import by_package

# The root mean square error of normal numbers: that of the K types is what the search reaches.
WITHIN = {
    "Q2_K": 0.279, "Q3_K": 0.1545, "Q4_K": 0.0725, "Q5_K": 0.0361, "Q6_K": 0.0178,
    "Q4_0": 0.10, "Q4_1": 0.09, "Q5_0": 0.05, "Q5_1": 0.045, "Q8_0": 0.008,
}  # fmt: skip


@pytest.mark.parametrize("name", WITHIN)
def test_packed_numbers_are_near(name: str) -> None:
    kind = block_type(name)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    blocks = pack(x, kind)
    assert blocks.shape == (64, kind.row_octets(512))
    found = by_package(blocks, kind)
    assert (found - x).square().mean().sqrt() < WITHIN[name]
    # What is on the grid of a type stays there, within the rounding of scales.
    again = by_package(pack(found, kind), kind)
    assert (again - found).square().mean().sqrt() < WITHIN[name] / 25


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_runs_of_other_sizes_signs_and_zeros_are_kept(name: str) -> None:
    """Each run has a scale of its own, and every code its place."""
    kind = block_type(name)
    x = torch.linspace(-1, 1, 256)[None] * (torch.arange(8)[:, None] * 0.5 - 1.7)
    far = torch.tensor([[0.7], [-0.7], [5.0]])  # runs of one number, and far from 0
    x = torch.cat((x, torch.zeros(1, 256), x.abs() + 0.1, -x.abs() - 0.1, x[:1] * 1e-2))
    x = torch.cat((x, far.expand(3, 256), far + x[1] * 1e-2))
    found = by_package(pack(x, kind), kind)
    assert not found[8].any()
    error = (found - x).square().mean(1).sqrt()
    size = x.abs().amax(1)
    most = {"Q2_K": 0.14, "Q3_K": 0.11, "Q4_K": 0.03, "Q5_K": 0.015, "Q6_K": 0.012}[name]
    assert bool((error <= most * size + 1e-12).all()), error / size.clamp(min=1e-9)


def test_what_cannot_be_packed_is_named() -> None:
    assert {"Q4_K", "Q6_K", "Q8_0", "Q4_0"} <= {*packable()}
    with pytest.raises(ValueError, match=r"type must be one of .*: got IQ3_S"):
        pack(torch.zeros(1, 256), block_type("IQ3_S"))
    with pytest.raises(ValueError, match="Q4_K has blocks of 256 numbers: got rows of 100"):
        pack(torch.zeros(1, 100), block_type("Q4_K"))
    with pytest.raises(ValueError, match="must be finite"):
        pack(torch.full((1, 256), torch.nan), block_type("Q4_K"))


def test_a_symmetric_scale_is_nearer_than_one_that_fits_the_largest_number():
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))

    def error(scale):
        code = (x / scale).round().clamp(-4, 3)
        return (x.square() * (x - scale * code).square()).sum(-1)

    found, plain = error(_symmetric(x, 4)), error(largest / -4)
    assert found.mean() < 0.9 * plain.mean()
