"""X-MOD (Pfeiffer et al. 2022): RoBERTa whose layers end in an adapter for each language.

A model is built for one language: ``default_language`` of config.json, or the only one. Files that
are saved hold that one alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyhead.config import TransformerConfig
from polyhead.config.adapter import AdapterConfig
from polyhead.errors import ConfigError
from polyhead.families import roberta
from polyhead.families.bert import LAYERS, ONLY_ENCODER
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import read_activation
from polyhead.families.common.tasks import MASKED
from polyhead.families.common.tensors import Rule, Tensors, under


def read(keys: Keys) -> TransformerConfig:
    config = roberta.read(keys, pre_norm=keys.flag("pre_norm"))
    factor, languages = keys.size("adapter_reduction_factor"), keys.texts("languages")
    if factor > config.embed_dim:
        most = f"1 to hidden_size={config.embed_dim}"
        raise keys.refused("adapter_reduction_factor", factor, most)
    language = keys.text("default_language", languages[0] if len(languages) == 1 else None)
    if language not in languages:
        named = ", ".join(languages[:_SHOWN]) + (" ..." if len(languages) > _SHOWN else "")
        raise keys.refused("default_language", language, f"one of languages: {named}")
    own, reused = keys.flag("adapter_layer_norm"), keys.flag("adapter_reuse_layer_norm")
    adapter = AdapterConfig(
        config.embed_dim // factor,
        read_activation(keys),
        norm="own" if own else "shared" if reused else None,
        keeps_normed=keys.flag("ln_before_adapter"),
        name=language,
    )
    layers = tuple(replace(layer, adapter=adapter) for layer in config.layers)
    return replace(config, layers=layers)


def write(config: TransformerConfig) -> dict[str, Any]:
    layer = config.layers[0]
    adapter = layer.adapter
    if adapter is None:
        raise ConfigError("in this family every layer has an adapter")
    return {
        **roberta.write("Xmod", config),
        "pre_norm": layer.norm_placement == "pre",
        "adapter_reduction_factor": config.embed_dim // adapter.dim,
        "adapter_layer_norm": adapter.norm == "own",
        "adapter_reuse_layer_norm": adapter.norm == "shared",
        "ln_before_adapter": adapter.keeps_normed,
        "languages": [adapter.name],
        "default_language": adapter.name,
    }


def table(values: Mapping[str, Any]) -> Tensors:
    languages = list(values.get("languages", _LANGUAGES))
    language = values.get("default_language") or languages[0]
    adapters = "encoder.layer.{i}.output.adapter_modules." + language
    rules = (
        *LAYERS,
        *under(
            adapters + ".dense",
            "layers.{i}.adapter.",
            {"1": "up_proj", "2": "down_proj"},
        ),
        Rule("encoder.layer.{i}.output.adapter_layer_norm", "layers.{i}.adapter.norm"),
        Rule("encoder.LayerNorm", "final_norm"),
    )
    made = roberta.table(rules, "roberta.", values)
    modules = r"encoder\.layer\.\d+\.output\.adapter_modules\."
    others = {rf"{modules}(?!{re.escape(language)}\.).+": "adapters of other languages"}
    return replace(made, dropped={**made.dropped, **others})


_LANGUAGES, _SHOWN = ("en_XX",), 8

FAMILIES = (
    Family(
        "xmod",
        "Xmod",
        read,
        table,
        defaults={
            **roberta.FAIRSEQ,
            "pre_norm": False,
            "adapter_reduction_factor": 2,
            "adapter_layer_norm": False,
            "adapter_reuse_layer_norm": True,
            "ln_before_adapter": True,
            "languages": _LANGUAGES,
            "default_language": None,
        },
        write=write,
        with_head=MASKED,
        not_supported=ONLY_ENCODER,
    ),
)
