"""docs/families.md and families.zh.md: what is read of every family, from the configurations that
the tests draw, and what its modules can do.

python tools/families_page.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from polyhead.config import LayerConfig, NormConfig, TransformerConfig
from polyhead.errors import UnsupportedError
from polyhead.families import REFUSED, families, read_config
from polyhead.families.common.family import Family
from polyhead.families.common.wrappers import WRAPPERS
from polyhead.layers.native_layer import NETWORK, last_part
from polyhead.models import Transformer
from polyhead.parallel.classes import check_classes
from polyhead.parallel.context import check_context
from polyhead.parallel.experts import mixtures

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/families"))

from harness import Case, all_cases  # noqa: E402

PAGES = {name: ROOT / f"docs/families{name}.md" for name in ("", ".zh")}

_ENGLISH = (
    """# Model families

Written by `python tools/families_page.py`, from the configurations that
the tests draw.

Each family is tested on a tiny random model that transformers saved, and compared with
transformers' eager float32. Outputs in one pass and through a cache in uneven chunks differ by less
than *exact to*, in standard deviations, from these or from transformers' float64; gradients by less
than 10⁻⁴ of the greatest, unless it says otherwise. Weights that are saved again are bit-identical,
and transformers loads them. An unknown key of config.json is an error that names it.

*Remembers* is what a cache holds for a layer: keys and values of every token, latents in place of
both, or a state of one size. *One call*: whether a decoding step is one native call for all layers,
in every kind of cache (–: encoders do not decode; begun: a native call for the first sub-layers,
modules for the rest; no: modules). *GGUF* is the architecture of GGUF files, tested in the same way,
and against llama.cpp where transformers has no class. *Parallel* are the dimensions of a mesh
beside data and shard, which all families have.

| `model_type` | kind | heads | remembers | positions | norms | feed-forward | one call | GGUF | parallel | exact to | not supported |
|---|---|---|---|---|---|---|---|---|---|---|---|""",  # noqa: E501
    """
## Text inside multimodal models

From the directory of a whole model the text model is loaded; it reads ids. Its type may be another
family's than the usual one here. What is left out stands in `Checkpoint.left_out`. The text
models of Qwen2-VL, Qwen3-VL, PaddleOCR-VL and Mistral Small 3 are read from GGUF files too
(`qwen2vl`, `qwen3vl`, `qwen3vlmoe`, `paddleocr`, `mistral3`).

Where a config.json states `mrope_section`, the text model also takes positions `[3, B, T]` of time,
height and width, as the whole gives them ([several coordinates](attention.md#several-coordinates)).
GGUF files and other layouts (Qwen4) take one position for each token.

| `model_type` | text model | left out |
|---|---|---|""",
    """
## Multi-token prediction

Some files hold modules behind the model's own layers that predict further tokens (DeepSeek-V3,
2024, §2.2). A model leaves them out (`Checkpoint.ignored`) and is saved without them. Of these
types the first module is read: {types}.

`predictor = ph.load_predictor(directory, model)` shares embedding and head with the model; copies
of them in the file are not read. From the model's hidden state of each token and the token after
it, `predictor.hidden_states(ids[:, 1:], hidden[:, :-1])` and `predictor.logits` predict the one
after that, in one pass, through a cache or for packed rows. For other types, and from GGUF files,
the module is refused by name.""",
    """
## Refused

| `model_type` | because |
|---|---|""",
)
_CHINESE = (
    """# 模型家族

由 `python tools/families_page.py` 生成，内容来自测试所抽取的配置。

每个家族都用 transformers 保存的微型随机模型来测试，与 transformers 的 eager float32 比对。无论一次算完，还是分成不等长的块经缓存计算，输出与它（或与 transformers 的 float64）之差都小于“精确到”一栏，以标准差计；除非该栏另有说明，梯度之差小于最大梯度的 10⁻⁴。再次保存的权重逐位相同，transformers 也能加载。config.json 里不认识的键会报错，并指出键名。

“记住”是缓存为一层保存的内容：每个词元的键和值，代替二者的潜在向量，或大小固定的状态。“一次调用”：解码一步是否在各种缓存里都只用一次原生调用算完所有层（–：编码器不解码；部分：前几个子层用原生调用，其余用模块；否：用模块）。“GGUF”是 GGUF 文件的架构名，以同样方式测试；transformers 没有对应类的，另与 llama.cpp 比对。“并行”列出网格中除 data 和 shard 之外的维度，这两个维度所有家族都有。不支持的键和拒绝的原因照错误信息的英文原样列出。

| `model_type` | 类型 | 头 | 记住 | 位置 | 归一化 | 前馈 | 一次调用 | GGUF | 并行 | 精确到 | 不支持 |
|---|---|---|---|---|---|---|---|---|---|---|---|""",  # noqa: E501
    """
## 多模态模型里的文本模型

从整个模型的目录里加载文本模型；它读词元编号。它的类型也可以不是这里写的常见类型。略去的部分见 `Checkpoint.left_out`。Qwen2-VL、Qwen3-VL、PaddleOCR-VL 和 Mistral Small 3 的文本模型也能从 GGUF 文件读取（`qwen2vl`、`qwen3vl`、`qwen3vlmoe`、`paddleocr`、`mistral3`）。

config.json 里写有 `mrope_section` 时，文本模型也接受时间、高、宽的位置 `[3, B, T]`，与整个模型给出的相同（[多个坐标](attention.md#多个坐标)）。GGUF 文件和其他布局（Qwen4）每个词元只接受一个位置。

| `model_type` | 文本模型 | 略去 |
|---|---|---|""",  # noqa: E501
    """
## 多词元预测

有些文件在模型自身的层之后还有预测后续词元的模块（DeepSeek-V3，2024，§2.2）。模型略去它们（`Checkpoint.ignored`），保存时也不写。以下类型读取第一个模块：{types}。

`predictor = ph.load_predictor(directory, model)` 与模型共用嵌入和输出头；文件里它们的副本不读取。由模型对每个词元的隐藏状态和它的下一个词元，`predictor.hidden_states(ids[:, 1:], hidden[:, :-1])` 与 `predictor.logits` 预测再下一个词元，可以一次算完，也可以经缓存或对打包的行计算。其他类型以及 GGUF 文件的模块会被拒绝，并指出名称。""",  # noqa: E501
    """
## 拒绝的类型

| `model_type` | 原因 |
|---|---|""",
)
_WORDS = {
    "encoder-decoder": "编码器-解码器",
    "encoder": "编码器",
    "decoder": "解码器",
    "sparse MLA": "稀疏 MLA",
    "differential attention": "差分注意力",
    "gated attention": "门控注意力",
    "heads that choose blocks": "选择块的头",
    "gated heads that choose blocks": "选择块的门控头",
    "hashed runs of tokens": "词元串的哈希",
    "last ids": "最近的词元编号",
    "native sparse attention": "原生稀疏注意力",
    "window and compressed blocks": "窗口与压缩块",
    "sub-norm attention": "内归一化注意力",
    "attention beside Mamba-2": "注意力与 Mamba-2 并列",
    "Kimi delta attention": "Kimi delta 注意力",
    "Lightning attention": "Lightning 注意力",
    "gated DeltaNet": "门控 DeltaNet",
    "keys of an earlier layer": "前面某层的键",
    "short convolution": "短卷积",
    "keys, values": "键、值",
    "pooled keys": "汇聚的键",
    "latents": "潜在向量",
    "keys of an indexer": "索引器的键",
    "last inputs": "最近的输入",
    "state": "状态",
    "window and sums of blocks": "窗口与分块之和",
    "heads of experts": "专家的头",
    "heads over pairs of tokens": "词元对上的头",
    "exclusive heads": "排除自身的头",
    "gated MLA": "门控 MLA",
    "blocks and global blocks": "分块与全局块",
    "blocks and global vectors": "分块与全局向量",
    "window and global tokens": "窗口与全局词元",
    "grouped projections": "分组投影",
    "narrow heads": "窄的头",
    "heads and convolutions": "头与卷积",
    "convolved queries and keys": "卷积后的查询与键",
    "affine": "仅缩放与平移",
    "content and distances": "内容与距离",
    "keys that values choose": "由值选择的键",
    "heads that hash": "哈希的头",
    "convolved keys": "卷积后的键",
    "profiles of distances": "距离曲线",
    "distances and segments": "距离与段",
    "rotary of a part": "旋转一部分",
    "rotary": "旋转",
    "also": "另有",
    "learned": "学习得到",
    "sinusoidal": "正弦",
    "relative bias": "相对偏置",
    "windows": "窗口",
    "chunks": "分段",
    "parallel, one norm": "并行，一个归一化",
    "parallel, two norms": "并行，两个归一化",
    "sandwich": "前后都有",
    "after": "仅在后",
    "pre": "前",
    "post": "后",
    "q and k": "q 和 k",
    "gated": "门控",
    "experts": "专家",
    "begun": "部分",
    "gradients": "梯度",
    "in float64": "以 float64 为",
    "yes": "是",
    "no": "否",
}
"""What cells say, in Chinese; names of types, keys and dimensions stay."""
_WORD = re.compile(rf"\b({'|'.join(sorted(map(re.escape, _WORDS), key=len, reverse=True))})\b")


NAMES = {
    "latent": "MLA",
    "sparse_latent": "sparse MLA",
    "differential": "differential attention",
    "funnel": "heads over pairs of tokens",
    "gated": "gated attention",
    "selective": "heads that choose blocks",
    "gated_selective": "gated heads that choose blocks",
    "engram": "hashed runs of tokens",
    "native_sparse": "native sparse attention",
    "compressed": "window and compressed blocks",
    "sub_norm": "sub-norm attention",
    "gated_delta": "gated DeltaNet",
    "kimi_delta": "Kimi delta attention",
    "lightning": "Lightning attention",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "hybrid_heads": "attention beside Mamba-2",
    "cross_layer": "keys of an earlier layer",
    "short_convolution": "short convolution",
    "rg_lru": "RG-LRU",
    "block_sums": "window and sums of blocks",
    "exclusive": "exclusive heads",
    "expert_heads": "heads of experts",
    "gated_latent": "gated MLA",
    "global_blocks": "blocks and global blocks",
    "global_prefix": "blocks and global vectors",
    "global_window": "window and global tokens",
    "grouped": "grouped projections",
    "disentangled": "content and distances",
    "dynamic_mask": "keys that values choose",
    "lsh": "heads that hash",
    "distance_profiles": "convolved keys, profiles of distances",
    "relative": "distances and segments",
    "bottleneck": "narrow heads",
    "convolved_heads": "heads and convolutions",
    "convolutional": "convolved queries and keys",
    "shared_block": "a shared block before Mamba",
}
"""Of head layouts, where they are not those of grouped heads."""
MEMORIES = {
    "PerToken": "keys, values",
    "Recent": "keys, values",
    "latent": "latents",
    "index": "keys of an indexer",
    "OfLayer": "keys of an earlier layer",
    "State": "state",
    "Tail": "last inputs",
    "TokenIds": "last ids",
    "Pooled": "pooled keys",
}
"""Of classes of memories."""


def pages() -> dict[str, str]:
    """The pages' texts, by what their names end with."""
    cases = all_cases()
    rows = [_row(family, cases[name]) for name, family in sorted(families().items())]
    refused = [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    wrapped = [
        f"| `{name}` | `{each.text_type}` | {_listed(f'`{part}`' for part in each.left_out)} |"
        for name, each in sorted(WRAPPERS.items())
    ]
    predicted = [f"`{name}`" for name, each in sorted(families().items()) if each.predictor]
    found: dict[str, str] = {}
    for name, (head, middle, further, end) in (("", _ENGLISH), (".zh", _CHINESE)):
        types = ("、" if name else ", ").join(predicted)
        said = [f"| {' | '.join(_translated(row) if name else row)} |" for row in rows]
        found[name] = "\n".join(
            (head, *said, middle, *wrapped, further.format(types=types), end, *refused, "")
        )
    return found


def _translated(cells: list[str]) -> list[str]:
    """A row in Chinese; the type, the dimensions and what is not supported stay."""
    kept = {0, 9, len(cells) - 1}
    return [
        cell if i in kept else _WORD.sub(lambda word: _WORDS[word[0]], cell)
        for i, cell in enumerate(cells)
    ]


def _row(family: Family, case: Case) -> list[str]:
    found = [_read(case)]
    found += [_read(case, option) for axis in case.axes for option in axis if option]
    layers = [layer for config in found for layer in (*config.layers, *config.encoder_layers)]
    return [
        f"`{family.model_type}`",
        _listed(config.kind for config in found),
        _listed(_heads(layer) for layer in layers),
        _listed(each for config in found for each in _memories(config)) or "–",
        _listed([*_rotary(layers), *(each for config in found for each in _positions(config))])
        or "–",
        _listed(_norms(layer) for layer in layers),
        _listed(each for layer in layers for each in _network(layer)) or "–",
        _decoding(found),
        ", ".join(each.gguf.arch for each in family.for_each_gguf() if each.gguf and case.gguf)
        or "–",
        _listed(_dimensions(found[0])) or "–",
        _exact(case),
        "; ".join(f"`{key}`: {why}" for key, why in family.not_supported.items()) or "–",
    ]


def _memories(config: TransformerConfig) -> Iterator[str]:
    """What a cache holds of the layers."""
    for layer in config.layers if config.kind != "encoder" else ():
        for memory in layer.attention.memories:
            kind = "latent" if getattr(memory, "latent", False) else type(memory).__name__
            yield MEMORIES.get(memory.name, MEMORIES[kind])


def _dimensions(config: TransformerConfig) -> Iterator[str]:
    """Dimensions of a mesh over which the model's modules can be spread."""
    model = Transformer(config)
    shared = config.weights_of or config.encoder.weights_of
    if not shared and _holds(check_classes, model, "tensor"):
        yield "tensor"
    if _holds(check_classes, model, "context") and _holds(check_context, model):
        yield "context"
    experts = mixtures(model)
    if experts and all(_holds(check_classes, each, "expert") for each in experts):
        yield "expert"


def _holds(check: Callable[..., None], *arguments: object) -> bool:
    try:
        check(*arguments)
    except UnsupportedError:
        return False
    return True


def _exact(case: Case) -> str:
    """The errors of the case, of gradients where it is another than the usual."""
    usual = Case("").gradient_error
    if case.gradient_error == usual:
        return _power(case.error)
    bound = case.float64_gradient_error
    exact = "" if bound is None else f"; in float64 {_power(bound)}"
    return f"{_power(case.error)} (gradients {_power(case.gradient_error)}{exact})"


def _power(number: float) -> str:
    """``5e-05`` as 5·10⁻⁵."""
    digits, _, exponent = f"{number:.0e}".partition("e-")
    return f"{digits}·10⁻{'⁰¹²³⁴⁵⁶⁷⁸⁹'[int(exponent)]}"


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
    if layer.norm_gate is not None:
        place += ", gated"
    normed = getattr(layer.attention, "qk_norm", None) is not None
    name = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "affine": "affine"}[norm.type]
    return f"{name} ({place}{', q and k' if normed else ''})"


def _network(layer: LayerConfig) -> Iterator[str]:
    for network in (*layer.networks, *getattr(layer.attention, "networks", ())):
        inner = getattr(network, "mixture", network)
        expert = getattr(inner, "expert", inner)
        gated = getattr(expert, "gated", False)
        yield f"{expert.activation}{' gated' if gated else ''}"  # type: ignore[attr-defined]
        if network is not expert:
            yield "experts"


if __name__ == "__main__":
    for name, text in pages().items():
        PAGES[name].write_text(text, encoding="utf-8")
