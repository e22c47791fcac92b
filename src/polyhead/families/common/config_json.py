"""config.json to a ``TransformerConfig`` and back, by the family that it names.

Every key is taken by the family's reader. A key that is not taken, and that is not known to be
harmless, is an error by name.

No rule decides which family fits a configuration. Each is asked to write it down, what it wrote is
read back, and the first that reads back as the same configuration is right: a file that would lose
a window or a bias is never written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from polyhead._utils.checks import check_number
from polyhead.config import TransformerConfig
from polyhead.config.data import MOST_NUMBER
from polyhead.errors import ConfigError, shortened
from polyhead.families.common import quantization
from polyhead.families.common.family import Family
from polyhead.families.common.keys import Keys
from polyhead.families.common.reading import ACTIVATIONS
from polyhead.families.common.writing import write_common

# Keys that change no number a model computes in evaluation: bookkeeping, training, generation and
# the labels of task heads.
GENERATION_KEYS = frozenset(
    (
        "decoder_start_token_id",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    )
)
"""Keys about the search for texts, which belong to generation_config.json; older files have them in
config.json."""

HARMLESS = frozenset(
    (
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "architectures",
        "auto_map",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "use_bfloat16",
        "initializer_range",
        "initializer_factor",
        "pretraining_tp",
        "gradient_checkpointing",
        "torchscript",
        "is_llama_config",
        "transformers.js_config",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "chunk_size_feed_forward",
        "tokenizer_class",
        "prefix",
        "task_specific_params",
        "problem_type",
        "finetuning_task",
        "id2label",
        "label2id",
        "num_labels",
        "_num_labels",
        "classifier_dropout",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "sentence_transformers",
        "sbert_ce_default_activation_function",
        *GENERATION_KEYS,
    )
)


def read_config(
    family: Family,
    values: Mapping[str, Any],
    where: object,
    *,
    shown: Mapping[str, str] | None = None,
    hints: Collection[str] = (),
) -> TransformerConfig:
    """The configuration that a config.json means.

    Args:
        family: That ``model_type`` names.
        values: The file's object.
        where: The file, for messages.
        shown: What messages call a key, where the values come from another format.
        hints: Keys that the family need not have.

    Raises:
        ConfigError: A key is missing, not understood or not supported, or a value is impossible;
            always by name.
    """
    keys = Keys(values, where, defaults=family.defaults, aliases=family.aliases, shown=shown)
    quantization.read_scheme(values, where)
    config = read_keys(keys, family)
    keys.finish({*HARMLESS, *family.harmless, family.initial_key, *hints})
    key = family.initial_key
    scale = values.get(key) or family.initial.scale
    check_number(f"{where}: {key}", scale, least=0.0, most=MOST_NUMBER, error=ConfigError)
    return replace(config, initial=replace(family.initial, scale=scale))


def write_config(
    config: TransformerConfig, families: Iterable[Family], prefer: str | None = None
) -> dict[str, Any]:
    """config.json's object for a configuration.

    Args:
        config: To be written.
        families: That may say it, the first choice first.
        prefer: The ``model_type`` to try before all others.

    Raises:
        ConfigError: No family can say it; the message names what is lost.
    """
    losses: dict[str, list[str]] = {}
    failed: dict[str, list[str]] = {}
    for family in sorted(families, key=lambda each: each.model_type != prefer):
        try:
            values = _written(config, family)
            again = read_config(family, values, f"as {family.model_type}")
        except Exception as error:  # foreign layers may break a family's writer
            failed[family.model_type] = [str(error)]
            continue
        if again == config:
            wanted = config.initial
            if wanted.rule == family.initial.rule and wanted.scale != family.initial.scale:
                values[family.initial_key] = wanted.scale
            return values
        losses[family.model_type] = differences(config.to_dict(), again.to_dict())
    # Families that could not write it are named only if none could.
    losses = losses or failed
    nearest = min(losses, key=lambda name: len(losses[name]))
    raise ConfigError(
        f"this configuration cannot be written for Hugging Face: the nearest family, "
        f"{nearest!r}, cannot say {losses[nearest][0]}"
    )


def read_keys(keys: Keys, family: Family) -> TransformerConfig:
    """What a family's reader makes of keys, of which some may be left over."""
    keys.take("model_type", family.model_type)
    keys.take(quantization.KEY, None)
    keys.expect("pruned_heads", {}, None)
    for key, reason in family.not_supported.items():
        value = keys.take(key, None)
        if value not in (None, False) and value != family.defaults.get(key):
            raise ConfigError(
                f"{keys.where}: {keys.named(key)} is {shortened(value)}, which is not supported: "
                f"{reason}"
            )
    try:
        config = family.read(keys)
    except ConfigError as error:
        if str(keys.where) in str(error):
            raise
        raise ConfigError(f"{keys.where}: {error}{keys.misspelt()}") from error
    if config.kind == "encoder":  # an encoder alone may have the file of both
        keys.flag("is_encoder_decoder", False)
    else:
        keys.expect("is_encoder_decoder", config.kind == "encoder-decoder")
    return config


def _written(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """What the shared writer and the family's own write, without keys that its reader ignores."""
    suffix = family.bare if config.head is None else family.with_head
    own = {
        "architectures": [family.class_name + suffix],
        "model_type": family.model_type,
        **family.write(config),
    }
    shared = {family.aliases.get(key, key): value for key, value in write_common(config).items()}
    values: dict[str, Any] = json.loads(json.dumps({**shared, **own}))
    for key, default in family.defaults.items():
        # Of several names of an activation the family's own, whose bits may differ from another's.
        if isinstance(default, str) and ACTIVATIONS.get(values.get(key, "")) == ACTIVATIONS.get(
            default, ""
        ):
            values[key] = default
    keys = Keys(values, family.model_type, defaults=family.defaults, aliases=family.aliases)
    read_keys(keys, family)
    return {key: value for key, value in values.items() if key not in {*keys.untaken()} - {*own}}


def differences(wanted: Any, got: Any, at: str = "") -> list[str]:
    """The leaves in which two nested configurations differ, as ``path=value``."""
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        return [
            found
            for key in wanted
            for found in differences(wanted[key], got.get(key), f"{at}.{key}" if at else str(key))
        ]
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        if len(wanted) == len(got):
            return [
                found
                for i, (left, right) in enumerate(zip(wanted, got, strict=True))
                for found in differences(left, right, f"{at}[{i}]")
            ]
        return [f"{at}={wanted!r}"]
    return [] if wanted == got else [f"{at}={wanted!r}"]
