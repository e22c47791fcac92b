"""Tiny random models of the families that polyhead's transformers integration promises."""

import torch
import transformers as hf

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GQA = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
SEQ2SEQ = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
MIXED = ["sliding_attention", "full_attention"]

DECODERS = {
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GQA, sliding_window=5)),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**GQA, sliding_window=5, num_local_experts=2)
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(
            **{k: v for k, v in GQA.items() if k != "head_dim"},
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
        )
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**GQA)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(
            **GQA,
            sliding_window=5,
            attn_logit_softcapping=3.0,
            layer_types=MIXED,
            query_pre_attn_scalar=16,
        )
    ),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**GQA, sliding_window=5, layer_types=MIXED)
    ),
    "deepseek_v2": lambda: hf.DeepseekV2ForCausalLM(
        hf.DeepseekV2Config(**TEXT, **MLA, num_key_value_heads=4, topk_method="greedy")
    ),
    "deepseek_v3": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(**TEXT, **MLA, num_key_value_heads=4)
    ),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(
            **GQA,
            sliding_window=5,
            layer_types=MIXED,
            num_local_experts=2,
            num_experts_per_tok=1,
        )
    ),
}
ENCODERS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**TEXT)),
    "albert": lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=16)),
}
ENCODER_DECODERS = {
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=99,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            pad_token_id=0,
            decoder_start_token_id=1,
            eos_token_id=2,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=12,
        )
    ),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**SEQ2SEQ)),
    "marian": lambda: hf.MarianMTModel(hf.MarianConfig(**SEQ2SEQ)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            **{k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"},
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=64,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    ),
}
OTHERS = {
    "vit": lambda: hf.ViTModel(
        hf.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=2,
        )
    ),
}
ALL = {**DECODERS, **ENCODERS, **ENCODER_DECODERS, **OTHERS}


def build(family):
    """A model whose every parameter matters: nothing zero, biases, norms and sinks included."""
    torch.manual_seed(0)
    model = ALL[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def real_tokens(side, batch=3, length=12):
    """``[B, T]`` 1 for real tokens, padded on one side (one row is full)."""
    lengths = torch.tensor([length, 5, 8])[:batch, None]
    columns = torch.arange(length)
    return (columns < lengths if side == "right" else columns >= length - lengths).long()


def inputs(family, side="right"):
    """Inputs of one forward pass, and ``[B, T]`` bool of the outputs that count."""
    torch.manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8)}, None
    real = real_tokens(side)
    ids = torch.randint(3, 99, real.shape) * real
    if family == "whisper":
        return {
            "input_features": torch.randn(3, 8, 20),
            "decoder_input_ids": ids,
            "decoder_attention_mask": real,
        }, real.bool()
    if family in ENCODER_DECODERS:
        target = torch.randint(3, 99, (3, 7))
        target_real = real_tokens(side, length=9)[:, :7] if side == "right" else torch.ones(3, 7)
        return {
            "input_ids": ids,
            "attention_mask": real,
            "decoder_input_ids": target,
            "decoder_attention_mask": target_real.long(),
        }, target_real.bool()
    return {"input_ids": ids, "attention_mask": real}, real.bool()
