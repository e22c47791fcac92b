"""transformers' compiled decoding with a static cache, which counts filled slots on the device."""

from __future__ import annotations

import pytest
import torch
import transformers

from polyhead.integrations import transformers as integration

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_with_a_static_cache_is_compiled_once(padded: bool) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    config._attn_implementation = integration.register()
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 61, (2, 6))
    attention_mask = torch.ones_like(ids)
    attention_mask[0, : 2 if padded else 0] = 0
    inputs = {"input_ids": ids, "attention_mask": attention_mask}
    more = {"max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(**inputs, **more)

    graphs = []

    def count(graph: torch.fx.GraphModule, _: object, **__: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    how = transformers.CompileConfig(fullgraph=True, backend=count, dynamic=False, mode=None)
    how._compile_all_devices = True
    model.generation_config.compile_config = how
    found = model.generate(**inputs, **more, cache_implementation="static")
    assert torch.equal(found, wanted)
    assert len(graphs) == 1
