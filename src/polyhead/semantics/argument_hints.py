"""polyhead's names for the arguments of other libraries' attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import NoReturn, ParamSpec

_WEIGHTS = "`with polyhead.probe(layer) as seen:`, which shows exact weights"
_GIVEN_MASK = "mask=Keep(tensor) (True: may attend), or bias=tensor for numbers that are added"
_OTHER_NAMES = {
    "is_causal": "mask=Causal()",
    "causal": "mask=Causal()",
    "attn_mask": _GIVEN_MASK,
    "attention_mask": _GIVEN_MASK,
    "attn_bias": "bias",
    "key_padding_mask": "mask=KeyLengths(lengths), or mask=Drop(padding[:, None, None])",
    "block_mask": "a mask expression, such as mask=Causal() & Window(size)",
    "score_mod": "bias, softcap and mask",
    "window_size": "mask=Causal() & Window(size), where size counts the query itself",
    "sliding_window": "mask=Causal() & Window(size)",
    "softmax_scale": "scale",
    "scaling": "scale",
    "logits_soft_cap": "softcap",
    "alibi_slopes": "bias=ALiBi(slopes)",
    "dropout": "dropout_p",
    "s_aux": "sinks",
    "enable_gqa": "nothing: kv heads that are fewer than query heads are shared",
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_attn_probs": _WEIGHTS,
    "return_softmax_lse": "return_lse",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "backend": "kernel",
    "impl": "kernel",
    "past_key_value": "cache",
    "past_key_values": "cache",
    "use_cache": "cache=polyhead.DenseCache()",
    "key": "context",
    "value": "context=(for_keys, for_values)",
    "position_ids": "positions",
}


_DROP_IN = "polyhead.integrations.torch.MultiheadAttention, which has torch's arguments"
_MOVED = "to(...) on the finished layer"
_OTHER_OPTIONS = _OTHER_NAMES | {
    "batch_first": "nothing: tensors are [batch, tokens, embed_dim]",
    "add_bias_kv": _DROP_IN,
    "add_zero_attn": _DROP_IN,
    "device": _MOVED,
    "dtype": _MOVED,
    "d_model": "embed_dim",
    "dim": "embed_dim",
    "hidden_size": "embed_dim",
    "nhead": "num_heads",
    "heads": "num_heads",
    "num_attention_heads": "num_heads",
    "num_heads_kv": "num_kv_heads",
    "kv_heads": "num_kv_heads",
    "num_key_value_heads": "num_kv_heads",
    "dim_head": "head_dim",
    "dim_feedforward": "hidden_dim",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "norm_first": "norm_placement='pre' or 'post'",
    "layer_norm_eps": "norm=NormConfig('layernorm', eps=...)",
    "attention_dropout": "dropout",
    "attn_dropout": "dropout",
    "qkv_bias": "bias",
    "attention_bias": "bias",
    "rope_theta": "rope=RoPE(theta)",
    "is_causal": "mask=Causal() in every call",
    "causal": "mask=Causal() in every call",
    "sliding_window": "window",
    "window_size": "window, which counts the query itself",
}
"""Arguments of constructors."""

_P = ParamSpec("_P")


def other_names(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor whose errors give polyhead's names for unknown arguments."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def told(*arguments: _P.args, **options: _P.kwargs) -> None:
        if unknown := [name for name in options if name not in known]:
            refuse(type(arguments[0]).__name__, unknown, _OTHER_OPTIONS)
        init(*arguments, **options)

    return told


def refuse(
    function: str, names: Iterable[str], other_names: Mapping[str, str] = _OTHER_NAMES
) -> NoReturn:
    """Raises TypeError for an argument that ``function`` does not have, with polyhead's name."""
    name = next(iter(names))
    said = f"{function} has no argument {name!r}"
    if name in other_names:
        raise TypeError(f"{said}; in polyhead that is {other_names[name]}")
    raise TypeError(said)
