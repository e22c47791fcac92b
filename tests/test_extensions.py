"""A package that is installed beside polyhead adds kinds of its own, and they are read back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEADS = """
from dataclasses import dataclass, replace
import torch
import polyhead as ph
from polyhead.config import AttentionConfig
from polyhead.families import families
from polyhead.families.common.family import Family
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.registry import register_builder


@dataclass(frozen=True)
class SignedConfig(AttentionConfig, kind="signed"):
    sign: float = -1.0


class Signed(MultiHeadAttention):
    def forward(self, x, *args, **options):
        return self.config.sign * super().forward(x, *args, **options)


def build(embed_dim, config, rope=None):
    return Signed.from_config(embed_dim, config, rope=rope)


register_builder(SignedConfig, build)


class Every(ph.Mask, arguments={"step": int}):
    def __init__(self, step):
        self.step = step

    def rule(self, of):
        q, k, step = of.q_position, of.k_position, of.number(self.step)
        return lambda pair: (q(pair) - k(pair)) % step(pair) == 0

    def of_rows(self, rows):
        return self


FAMILIES = ()


def __getattr__(name):
    raise AttributeError(name)
"""
FAMILY = """
from dataclasses import replace
from polyhead.families import llama
(LLAMA,) = llama.FAMILIES[:1]
FAMILIES = (replace(LLAMA, model_type="my_llama"), LLAMA)
"""


def run(folder: Path, script: str, points: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a script beside a package that is installed in a folder."""
    (folder / "my_package").mkdir()
    (folder / "my_package" / "__init__.py").write_text("")
    (folder / "my_package" / "heads.py").write_text(HEADS)
    (folder / "my_package" / "family.py").write_text(FAMILY)
    (folder / "my_package" / "broken.py").write_text("import there_is_no_such_module")
    about = folder / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = [f"{name} = {module}" for name, module in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[polyhead]", *lines, ""]))
    return run_here(folder, script)


def run_here(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script beside the package that ``run`` has installed."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


READ_BACK = """
# A layout is read from JSON, built, decoded with a cache, planned.
import json, torch, polyhead as ph
from polyhead.config import HeadLayout, TransformerConfig
sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
config = HeadLayout.from_dict({"kind": "signed", "sign": 2.0} | sizes)
assert type(config).__module__ == "my_package.heads"
assert HeadLayout.from_dict(json.loads(json.dumps(config.to_dict()))) == config
from polyhead.config import FeedForwardConfig, LayerConfig, NormConfig
layer = LayerConfig(config, FeedForwardConfig(32), NormConfig())
whole = TransformerConfig("decoder", 50, 16, 64, (layer, layer))
assert TransformerConfig.from_json(whole.to_json()) == whole
model = ph.Transformer(whole).eval()
assert type(model.layers[0].attention).__name__ == "Signed"
ids = torch.arange(12)[None] % 50
with torch.no_grad():
    logits = model(ids)
    cache = model.new_cache()
    parts = [model(ids[:, i : i + 1], cache=cache) for i in range(12)]
torch.testing.assert_close(torch.cat(parts, 1), logits, atol=1e-5, rtol=1e-5)
assert ph.plan(whole, tokens=12).cache_bytes > 0

# A mask of a probe is saved and read.
import torch, polyhead as ph
from polyhead.interpret import files
import my_package.heads as heads
mask = heads.Every(3) & ph.Causal()
files.write("kept", [mask])
assert files.read("kept") == [mask]
"""


def test_layouts_and_masks_of_a_package_are_read_back(tmp_path):
    done = run(tmp_path, READ_BACK, {"heads": "my_package.heads"})
    assert done.returncode == 0, done.stderr
    reading = """
from polyhead.interpret import files
(mask,) = files.read("kept")
assert type(mask.right).__name__ == "Every" or type(mask.left).__name__ == "Every"
"""
    again = run_here(tmp_path, reading)  # this process has not imported the package
    assert again.returncode == 0, again.stderr


def test_families_of_a_package_load_and_polyheads_own_stay(tmp_path):
    script = """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from polyhead.families import families
    found = families()
assert found["my_llama"].model_type == "my_llama"
assert found["llama"].model_type == "llama"
(one,) = [str(each.message) for each in said if "my_package" in str(each.message)]
assert one == "polyhead keeps its family 'llama' and leaves out that of my_package.family", one
"""
    done = run(tmp_path, script, {"family": "my_package.family"})
    assert done.returncode == 0, done.stderr


def test_a_package_that_cannot_be_imported_is_named_and_left_out(tmp_path):
    script = """
from polyhead.config import HeadLayout
sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
assert HeadLayout.from_dict({"kind": "signed"} | sizes).sign == -1
"""
    points = {"broken": "my_package.broken", "heads": "my_package.heads"}
    done = run(tmp_path, script, points)
    assert done.returncode == 0, done.stderr
    assert (
        "polyhead does without the extension broken (my_package.broken): ModuleNotFoundError: "
        "No module named 'there_is_no_such_module'" in done.stderr
    )


def test_without_the_package_its_kinds_are_refused_by_name(tmp_path):
    script = """
from polyhead.config import HeadLayout
HeadLayout.from_dict({"kind": "signed", "num_heads": 2, "num_kv_heads": 1, "head_dim": 8})
"""
    done = run(tmp_path, script, {})
    assert done.returncode == 1
    assert "HeadLayout: kind must be one of heads, latent" in done.stderr
    assert done.stderr.rstrip().endswith("got 'signed'")


def test_a_kind_that_is_taken_is_refused():
    from polyhead.config import AttentionConfig

    with pytest.raises(TypeError, match=r"kind 'heads' is taken by polyhead\.config\.attention"):

        class Heads(AttentionConfig, kind="heads"):
            pass
