"""Tiny random encoder-decoders and decoders, in transformers and here, from one directory."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
import transformers as hf
from hypothesis import strategies as st

import polyhead as ph

BOS, PAD, EOS, UNK = range(4)
LANGUAGES = ("en_XX", "fr_XX", "de_DE")
VOCABULARY = 4 + 26 + 1 + len(LANGUAGES)
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
IDS = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}

_T5 = {
    "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": PAD, "tie_word_embeddings": False, **IDS,
}  # fmt: skip
_BART = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40,
    "max_position_embeddings": 64, "decoder_start_token_id": EOS, "init_std": 0.5,
    "forced_eos_token_id": None, "tie_word_embeddings": False, **IDS,
}  # fmt: skip
_DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.5, **IDS,
}  # fmt: skip
_GEMMA = {
    "vocab_size": VOCABULARY, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 6,
    "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"], **_DECODER,
}  # fmt: skip

CONFIGS = {
    "t5": (hf.T5Config, {**_T5, "feed_forward_proj": "gated-gelu"}),
    "bart": (hf.BartConfig, _BART),
    "mbart": (hf.MBartConfig, _BART),
    "pegasus": (hf.PegasusConfig, _BART),
    "marian": (hf.MarianConfig, {**_BART, "decoder_vocab_size": VOCABULARY}),
    "m2m_100": (hf.M2M100Config, _BART),
    "blenderbot": (hf.BlenderbotConfig, _BART),
    "switch": (
        hf.SwitchTransformersConfig,
        {**_T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
         "expert_capacity": 64},
    ),
    "t5gemma2": (
        hf.T5Gemma2Config,
        {"encoder": {"text_config": _GEMMA, "vision_config": {"num_hidden_layers": 0,
         "hidden_size": 1, "num_attention_heads": 1, "image_size": 16, "patch_size": 1}},
         "decoder": _GEMMA, "decoder_start_token_id": EOS, **IDS},
    ),
    "gpt2": (
        hf.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.5,
         **IDS},
    ),
    "llama": (hf.LlamaConfig, {**_DECODER, "num_key_value_heads": 2}),
    "deepseek_v3": (
        hf.DeepseekV3Config,
        {**_DECODER, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
         "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2},
    ),
    "mistral": (hf.MistralConfig, {**_DECODER, "num_key_value_heads": 2, "sliding_window": 6}),
}  # fmt: skip
DECODERS = ("gpt2", "llama", "deepseek_v3", "mistral")


def letters(*, bare: bool = False) -> tokenizers.Tokenizer:
    """A token for each small letter and the space, and one for each language."""
    words = [*SPECIAL.values(), *map(chr, range(ord("a"), ord("z") + 1)), "▁"]
    vocabulary = {word: index for index, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    made.add_special_tokens([*SPECIAL.values(), *LANGUAGES])
    if not bare:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", EOS)]
        )
    return made


def write_tokenizer(folder: Path, *, bare: bool = False, **declared) -> None:
    letters(bare=bare).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL | declared), encoding="utf-8")


def make_pair(name: str, folder: Path, *, tokenizer: bool = True, **changes):
    """The model of a family as transformers has it and as ``ph.load`` gives it."""
    kind, values = CONFIGS[name]
    torch.manual_seed(7)
    config = kind(**{"vocab_size": VOCABULARY, **values, **changes})
    model = hf.AutoModelForCausalLM if name in DECODERS else hf.AutoModelForSeq2SeqLM
    theirs = model.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if parameter.ndim > 1 and parameter.requires_grad:
                embedding = "embed" in parameter_name or "shared" in parameter_name
                torch.nn.init.normal_(parameter, std=1.0 if embedding else 0.4)
        if getattr(theirs, "final_logits_bias", None) is not None:
            theirs.final_logits_bias[:, EOS] = 0.5
    theirs.save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder, bare=name in DECODERS)
    return theirs, ph.load(folder)


VALUES = {
    "length_penalty": 2.0,
    "early_stopping": True,
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": ((11,), (12, 13), (14, 15, 16)),
    "suppress_tokens": (PAD, 9, 10, 20),  # M2M-100 counts positions without padding there
    "begin_suppress_tokens": (21, 22, 23),
    "min_length": 9,
    "min_new_tokens": 6,
    "forced_bos_token_id": 25,
    "forced_eos_token_ids": (EOS,),
    "exponential_decay_length_penalty": (3, 1.4),
    "remove_invalid_values": True,
    "renormalize_logits": True,
}
"""A value of each option that changes what is written."""

OPTIONS = {
    **{name: st.just(value) for name, value in VALUES.items()},
    "length_penalty": st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0]),
    "early_stopping": st.sampled_from([True, False, "never"]),
    "repetition_penalty": st.sampled_from([1.3, 0.7]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "min_length": st.integers(1, 12),
    "min_new_tokens": st.integers(1, 8),
}
# Beside exponential_decay_length_penalty it makes infinite scores, there as here.
del OPTIONS["remove_invalid_values"]
DRAWS = {
    "top_k": st.integers(1, 30),
    "top_p": st.sampled_from([0.2, 0.8, 0.99]),
    "min_p": st.sampled_from([0.05, 0.5]),
    "typical_p": st.sampled_from([0.3, 0.9]),
    "epsilon_cutoff": st.sampled_from([0.01, 0.2]),
    "eta_cutoff": st.sampled_from([0.01, 0.2]),
}
"""Strategies of hypothesis for each option."""


def their_texts(model, source: list[int], *, eos: int = EOS, **options):
    """Transformers' texts as tokens without the start token, and their scores."""
    renamed = dict(options)
    if renamed.pop("temperature", None):
        renamed |= {"do_sample": True, "temperature": options["temperature"]}
        renamed.setdefault("top_k", 0)
    elif options:
        renamed["do_sample"] = False
    if "forced_eos_token_ids" in renamed:
        renamed["forced_eos_token_id"] = list(renamed.pop("forced_eos_token_ids"))
    for name in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"):
        if name in renamed:
            renamed[name] = [list(w) if isinstance(w, tuple) else w for w in renamed[name]]
    if (seed := renamed.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    ids = torch.tensor([source])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        return_dict_in_generate=True,
        output_scores=True,
        **renamed,
    )
    before = 1 if model.config.is_encoder_decoder else len(source)
    texts = []
    for row in found.sequences[:, before:].tolist():
        end = row.index(eos) + 1 if eos in row else len(row)
        texts.append(tuple(row[:end]))
    scores = getattr(found, "sequences_scores", None)
    return texts, None if scores is None else scores.tolist()
