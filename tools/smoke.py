"""What an installed polyhead must be able to do, in seconds and without the test packages.

    python tools/smoke.py [--native | --pure]

``--native``: its C++ code must be there and agree; ``--pure``: it must say why it is not.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import polyhead as ph
from polyhead import native
from polyhead.families import read_config
from polyhead.models import Transformer

TINY = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


def attend() -> None:
    q, k, v = torch.randn(1, 8, 40, 32), torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40, 32)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(wanted.square().sum(), exact)
    for kernel in ("auto", "tiled", "reference"):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        found = ph.attention(*given, mask=ph.Causal(), kernel=kernel)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        for got, grad in zip(torch.autograd.grad(found.square().sum(), given), grads, strict=True):
            torch.testing.assert_close(got.double(), grad, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def cached() -> None:
    layer = ph.MultiHeadAttention(64, num_heads=4, num_kv_heads=2, rope=ph.RoPE())
    cache, x = ph.DenseCache(), torch.randn(2, 9, 64)
    whole = layer(x, mask=ph.Causal())
    parts = [layer(x[:, :5], mask=ph.Causal(), cache=cache)]
    parts += [layer(x[:, 5:], mask=ph.Causal(), cache=cache)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def saved() -> None:
    model, ids = Transformer(read_config(TINY, Path("config.json"))).eval(), torch.arange(9)[None]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        assert ph.save(model, folder) == "hugging-face"
        again = ph.load(folder)  # Windows removes no file that this one maps
        torch.testing.assert_close(again.transformer(ids), model(ids), rtol=0, atol=0)


def main(arguments: list[str]) -> None:
    reason = native.unavailable()
    if "--native" in arguments and reason is not None:
        sys.exit(f"the native code is not used: {reason}")
    if "--native" in arguments and (better := native.left_out()) is not None:
        sys.exit(f"the native code for {better}, which this processor runs, was not compiled")
    if "--pure" in arguments and reason is None:
        sys.exit("native code was found in a wheel that should have none")
    torch.manual_seed(0)
    attend()
    cached()
    saved()
    assert ph.plan("llama-3-8b").parameters.total == 8_030_261_248
    for verb in (["--version"], ["--help"], ["plan", "gpt2"], ["doctor"]):
        subprocess.run(
            [sys.executable, "-m", "polyhead.cli", *verb], check=True, stdout=subprocess.DEVNULL
        )
    print(f"polyhead {ph.__version__} works: {reason or native.code().name}")


if __name__ == "__main__":
    main(sys.argv[1:])
