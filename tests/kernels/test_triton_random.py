"""Our Triton kernels match the formula in float64 on calls drawn at random, interpreted on a CPU.

TRITON_INTERPRET=1 pytest tests/kernels/test_triton_random.py [-m "not slow"]
"""

import pytest
import torch

pytest.importorskip("triton")

from random_calls import drawn, worst_share

import polyhead as ph
from polyhead.errors import UnsupportedError
from polyhead.kernels import KERNELS

if (_why := KERNELS["triton"].unavailable()) is not None:
    pytest.skip(_why, allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def judge(seeds):
    for seed in seeds:
        call = drawn(seed)
        if "bias=of content" in call.words:
            with pytest.raises(UnsupportedError, match="RelativeContentBias"):
                worst_share(call, "triton", DEVICE)
            continue
        share, part = worst_share(call, "triton", DEVICE)
        assert share <= 1.0, f"{part} is off {share:.3g} times what it may: {call.words}"


def test_a_few_random_calls_match_the_formula_forward_and_backward():
    judge([5, 170, 495])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(6))
def test_random_calls_match_the_formula_forward_and_backward(part):
    judge(range(100 * part, 100 * part + 100))


@pytest.mark.parametrize("T", [8, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drawn_mask_whose_last_visible_keys_are_in_a_tile_of_their_own(T, dtype):
    q, k, v = (torch.randn(1, 1, n, 32).to(DEVICE, dtype) for n in (T, 257, 257))
    mine, theirs = (
        ph.attention(q, k, v, mask=~ph.Causal(), kernel=name) for name in ("triton", "reference")
    )
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(mine, theirs, atol=close, rtol=close)
