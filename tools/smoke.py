"""What an installed polyhead must be able to do, in seconds and without the test packages.

    python tools/smoke.py [--native | --pure]

``--native``: its C++ code must be there and agree; ``--pure``: it must say why it is not.
"""

from __future__ import annotations

import subprocess
import sys

import torch

import polyhead as ph
from polyhead import native


def main(arguments: list[str]) -> None:
    reason = native.unavailable()
    if "--native" in arguments and reason is not None:
        sys.exit(f"the native code is not used: {reason}")
    if "--native" in arguments and (better := native.left_out()) is not None:
        sys.exit(f"the native code for {better}, which this processor runs, was not compiled")
    if "--pure" in arguments and reason is None:
        sys.exit("native code was found in a wheel that should have none")
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 8, 40, 32), torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    for kernel in ("auto", "tiled", "reference"):
        found = ph.attention(q, k, v, mask=ph.Causal(), kernel=kernel)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    layer = ph.MultiHeadAttention(64, num_heads=4, num_kv_heads=2, rope=ph.RoPE())
    cache, x = ph.DenseCache(), torch.randn(2, 9, 64)
    with torch.no_grad():
        whole = layer(x, mask=ph.Causal())
        parts = [layer(x[:, :5], mask=ph.Causal(), cache=cache)]
        parts += [layer(x[:, 5:], mask=ph.Causal(), cache=cache)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)
    assert ph.plan("llama-3-8b").parameters.total == 8_030_261_248
    for verb in (["--version"], ["--help"], ["plan", "gpt2"], ["doctor"]):
        subprocess.run(
            [sys.executable, "-m", "polyhead.cli", *verb], check=True, stdout=subprocess.DEVNULL
        )
    print(f"polyhead {ph.__version__} works: {reason or native.code().name}")


if __name__ == "__main__":
    main(sys.argv[1:])
