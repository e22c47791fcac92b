"""docs/families.md: what is read of every family, from the configurations that the tests draw.

python tools/families_page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from polyhead.config import LayerConfig, NormConfig, TransformerConfig
from polyhead.families import REFUSED, families, read_config
from polyhead.families.common.family import Family
from polyhead.families.common.wrappers import WRAPPERS
from polyhead.layers.native_layer import NETWORK, last_part

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/families"))

from harness import Case, all_cases  # noqa: E402

PAGE = ROOT / "docs/families.md"

_HEAD = """# Model families

Written by `python tools/families_page.py`, from the configurations that
the tests draw.

Each family is tested on a tiny random model that transformers saved, and compared with
transformers' eager float32. Outputs in one pass and through a cache in uneven chunks differ by less
than 5·10⁻⁵ of their standard deviation, gradients by less than 10⁻⁴ of the greatest. Weights that
are saved again are bit-identical, and transformers loads them. An unknown key of config.json is an
error that names it.

*GGUF* is the architecture of GGUF files, tested in the same way. *One call*: whether a decoding
step is one native call for all layers, in every kind of cache (–: encoders do not decode; begun: a
native call for the first sub-layers, modules for the rest; no: modules).

| `model_type` | kind | heads | positions | norms | feed-forward | one call | GGUF | not supported |
|---|---|---|---|---|---|---|---|---|"""

_WRAPPED = """
## Text inside multimodal models

From the directory of a whole model the text model is loaded; it reads ids. Its type may be another
family's than the usual one here. What is left out stands in `Checkpoint.left_out`.

| `model_type` | text model | left out |
|---|---|---|"""
_REFUSED = """
## Refused

| `model_type` | because |
|---|---|"""


NAMES = {
    "latent": "MLA",
    "sparse_latent": "sparse MLA",
    "differential": "differential attention",
    "gated": "gated attention",
    "sub_norm": "sub-norm attention",
    "gated_delta": "gated DeltaNet",
    "kimi_delta": "Kimi delta attention",
    "lightning": "Lightning attention",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "hybrid_heads": "attention beside Mamba-2",
    "cross_layer": "keys of an earlier layer",
    "short_convolution": "short convolution",
}
"""Of head layouts, where they are not those of grouped heads."""


def page() -> str:
    """The page's text."""
    cases = all_cases()
    rows = [_row(family, cases[name]) for name, family in sorted(families().items())]
    refused = [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    wrapped = [
        f"| `{name}` | `{each.text_type}` | {_listed(f'`{part}`' for part in each.left_out)} |"
        for name, each in sorted(WRAPPERS.items())
    ]
    parts = (_HEAD, *rows, _WRAPPED, *wrapped, _REFUSED, *refused, "")
    return "\n".join(parts)


def _row(family: Family, case: Case) -> str:
    found = [_read(case)]
    found += [_read(case, option) for axis in case.axes for option in axis if option]
    layers = [layer for config in found for layer in (*config.layers, *config.encoder_layers)]
    cells = [
        f"`{family.model_type}`",
        _listed(config.kind for config in found),
        _listed(_heads(layer) for layer in layers),
        _listed([*_rotary(layers), *(each for config in found for each in _positions(config))]),
        _listed(_norms(layer) for layer in layers),
        _listed(each for layer in layers for each in _network(layer)),
        _decoding(found),
        family.gguf.arch if family.gguf and case.gguf else "–",
        "; ".join(f"`{key}`: {why}" for key, why in family.not_supported.items()) or "–",
    ]
    return f"| {' | '.join(cells)} |"


def _decoding(found: Iterable[TransformerConfig]) -> str:
    """How far native code gets in a decoding step of a layer."""
    layers = (layer for config in found if config.kind != "encoder" for layer in config.layers)
    ends = {last_part(layer) for layer in layers}
    words = (("yes", NETWORK in ends), ("begun", bool(ends - {0, NETWORK})), ("no", 0 in ends))
    return ", ".join(word for word, there in words if there) or "–"


def _read(case: Case, *options: object) -> TransformerConfig:
    values = json.loads(case.config(*options).to_json_string())  # type: ignore[arg-type]
    return read_config(values, case.model_type)


def _listed(words: Iterable[str]) -> str:
    """Each once, in the order in which they come."""
    return ", ".join(dict.fromkeys(words))


def _heads(layer: LayerConfig) -> str:
    attention = layer.attention
    if attention.kind != "heads":
        return NAMES.get(attention.kind, attention.kind)
    groups = attention.num_kv_heads  # type: ignore[attr-defined]
    return "MQA" if groups == 1 else "MHA" if groups == attention.num_heads else "GQA"


def _rotary(layers: Iterable[LayerConfig]) -> Iterator[str]:
    """The rotary embedding with all of its types, and whether it turns whole heads."""
    ropes = [rope for layer in layers if (rope := layer.attention.rope) is not None]
    if ropes:
        kinds = [rope.type for rope in ropes if rope.type != "default"]
        parts = " of a part" if any(rope.dim is not None for rope in ropes) else ""
        yield f"rotary{parts}" + (f" (also {_listed(kinds)})" if kinds else "")


def _positions(config: TransformerConfig) -> Iterator[str]:
    if config.embedding.positions:
        yield config.embedding.positions
    if config.relative_bias is not None or config.encoder.relative_bias is not None:
        yield "relative bias"
    for layer in config.layers:
        attention = layer.attention
        if getattr(attention, "alibi", None) is not None:
            yield "ALiBi"
        if getattr(attention, "window", None) is not None:
            yield "windows"
        if getattr(attention, "chunk", None) is not None:
            yield "chunks"


def _norms(layer: LayerConfig) -> str:
    norm: NormConfig = layer.norm
    place = layer.norm_placement
    if layer.parallel is not None:
        place = f"parallel, {layer.parallel}"
    normed = getattr(layer.attention, "qk_norm", None) is not None
    name = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[norm.type]
    return f"{name} ({place}{', q and k' if normed else ''})"


def _network(layer: LayerConfig) -> Iterator[str]:
    network = layer.feed_forward
    if network is None:
        return
    expert = getattr(network, "expert", network)
    gated = getattr(expert, "gated", False)
    yield f"{expert.activation}{' gated' if gated else ''}"  # type: ignore[attr-defined]
    if network is not expert:
        yield "experts"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
