"""Families that are refused as a whole, and why."""

from __future__ import annotations

from collections.abc import Mapping

_LINEAR = "some of its layers are linear attention with a recurrent state, not softmax attention"
_STATE_SPACE = "its layers are state-space models, not attention"

REFUSED: Mapping[str, str] = {
    "minimax": _LINEAR,
    "recurrent_gemma": "some of its layers are linear recurrences, not attention",
    "jamba": "most of its layers are state-space models, not attention",
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "falcon_mamba": _STATE_SPACE,
    "rwkv": "its layers are linear recurrences, not attention",
    "deberta": "its scores depend on the content of relative positions (disentangled attention)",
    "deberta-v2": "its scores depend on the content of relative positions (disentangled attention)",
    "xmod": "every layer ends in one of several adapters, chosen by the language of the text",
    "roc_bert": "its embedding also reads the shape and the pronunciation of every character",
    "longformer": "its global tokens have projections of their own beside the window",
    "led": "its global tokens have projections of their own beside the window",
    "big_bird": "it attends to blocks drawn at random",
    "bigbird_pegasus": "it attends to blocks drawn at random",
    "longt5": "its encoder attends within blocks and to summaries of blocks",
    "pegasus_x": "its encoder attends within staggered blocks and to global tokens",
    "prophetnet": "its decoder predicts several tokens ahead in streams of their own",
    "reformer": "it attends within buckets of a hash",
    "xlnet": "it attends in two streams over permuted tokens",
    "transfo-xl": "its scores depend on the content of relative positions",
    "gemma3n_text": "its layers exchange several residual streams and share keys between layers",
    "longcat_flash": "its experts read the first half of a layer and join the stream behind the "
    "second, and some give back their input",
    "jetmoe": "the projections of its queries and outputs are experts that each token chooses",
    "step3p7": "it clamps what activations give, and its file is that of a model with images",
    "doge": "its scores have a bias made of the values, whose largest alone are read",
    "zaya": "its queries and keys are convolved, and its routers read those of earlier layers",
    "hrm_text": "its two stacks of layers take turns over two states, several times for each token",
    "beam": "its residual stream shrinks with depth, and its gates have a bias for each head",
    "minimax_m3_vl_text": "its layers choose the blocks of keys that each kv head reads",
    "cpmant": "it puts learned prompts before a text, and every token sees all others",
    "axk2": "its norms are gated by a network, and its gates are made of the queries' latents",
    "fnet": "it mixes tokens by a Fourier transform, not attention",
}
