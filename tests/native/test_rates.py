"""The processor's rates: what was done is counted, and what does not run here is refused."""

import pytest
import torch

from polyhead import native
from polyhead.native import rates, tensor_check

pytestmark = pytest.mark.skipif(native.code() is None, reason="needs native code")
EVERY = [name for dtype in (torch.bfloat16, torch.int8) for name in rates.instructions(dtype)]


@pytest.mark.parametrize("instruction", EVERY)
def test_operations_are_counted_for_all_threads(instruction):
    done = tensor_check.MODULE.at_rate(instruction, 1, 10)
    assert done >= 10 * 12 * 2 * 8  # chains, a product and a sum, lanes of the narrowest
    assert tensor_check.MODULE.at_rate(instruction, 1, 30) == 3 * done
    assert rates.compute(instruction, 1e6) >= 0.99e6


def test_wider_instructions_do_more_in_a_round():
    done = {name: tensor_check.MODULE.at_rate(name, 1, 1) for name in EVERY}
    expected = {"fma_256": 192, "fma_512": 384, "bf16_pairs": 768, "int8_quads": 1536}
    expected |= {"bf16_tiles": 1024 * 192, "int8_tiles": 2048 * 192}
    assert done == {name: expected[name] for name in EVERY}


def test_tiles_of_parts_count_the_products_of_the_numbers_that_these_are_parts_of():
    for dtype, products in ((torch.float16, 4), (torch.float32, 6)):
        for name in set(rates.instructions(dtype)) - {"fma_256", "fma_512"}:
            done = rates.compute(name, 1e6)
            assert done >= 1e6
            assert (done * products) % (1024 * 192) == pytest.approx(0)


def test_what_does_not_run_here_is_refused():
    with pytest.raises(ValueError, match="one that runs here: got fma_4096"):
        tensor_check.MODULE.at_rate("fma_4096", 1, 1)
    with pytest.raises(ValueError, match="at least 1"):
        tensor_check.MODULE.at_rate("fma_256", 0, 1)


def test_memory_is_read_in_pieces_of_512_bytes():
    module = tensor_check.MODULE
    assert rates.reader(1000) is not None
    for wrong in (torch.zeros(513, dtype=torch.uint8), torch.zeros(512)):
        with pytest.raises(ValueError, match="bytes, in pieces of 512"):
            module.read_all(wrong, 1, 1)
