"""The drop-ins under torch.compile, export, torch.func, autocast and checkpoint."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from polyhead.integrations.torch import replace

sys.path.insert(0, str(Path(__file__).parent))

B, T, E = 2, 10, 16
REFUSED = """
import torch, transformers
from polyhead.integrations import transformers as integration

integration.register()
config = transformers.MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=20)
model = transformers.MptModel(config)
model.config._attn_implementation = "polyhead"
compiled = torch.compile(model, fullgraph=True, backend="eager")
try:
    compiled(torch.arange(4)[None], use_cache=False)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
PADDED = torch.arange(T) >= torch.tensor([[7], [T]])
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor needs a C++ compiler"
)


class Padded(nn.Module):
    """torch's module, replaced, with padding; its weights beside its output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = replace(nn.MultiheadAttention(E, 2, batch_first=True))

    def forward(self, x):
        return torch.cat(self.attention(x, x, x, key_padding_mask=PADDED), dim=-1)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, 2, 24, batch_first=True, dropout=0.0)
    return replace(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


TORCH = {"module with weights": Padded, "encoder": encoder}
torch_modules = pytest.mark.parametrize("name", TORCH)


def tokens():
    return torch.randn(B, T, E, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(module, function, x):
    return torch.autograd.grad(function(x).float().sin().sum(), (x, *module.parameters()))


def close(found, expected, atol):
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=atol)


@torch_modules
def test_torch_modules_compile_as_one_graph_with_the_same_gradients(name):
    module, x = TORCH[name](), tokens()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), module(x), atol=1e-6)
    close(gradients(module, compiled, x), gradients(module, module, x), 1e-5)


@torch_modules
def test_torch_modules_export(name):
    module, x = TORCH[name]().eval(), tokens().detach()
    exported = torch.export.export(module, (x,)).module()
    assert torch.allclose(exported(x), module(x), atol=1e-6)


@torch_modules
def test_vmap_of_grad_gives_the_gradients_of_each_example(name):
    module = TORCH[name]()
    many = torch.stack([tokens().detach(), 2 * tokens().detach()])
    parameters = {key: p.detach() for key, p in module.named_parameters()}

    def total(parameters, x):
        return functional_call(module, parameters, (x,)).sin().sum()

    found = vmap(grad(total), in_dims=(None, 0))(parameters, many)
    for i, x in enumerate(many):
        expected = torch.autograd.grad(module(x).sin().sum(), list(module.parameters()))
        close([piece[i] for piece in found.values()], expected, 1e-4)


@torch_modules
def test_checkpoint_recomputes_the_same(name):
    module, x = TORCH[name](), tokens()
    kept = gradients(module, module, x)
    again = gradients(module, lambda x: checkpoint(module, x, use_reentrant=False), x)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


@torch_modules
def test_autocast_keeps_single_gradients(name):
    module, x = TORCH[name](), tokens()
    exact = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = module(x)
    assert 0 < (low.float() - exact).abs().max() < 0.03 * exact.abs().max()
    found = torch.autograd.grad(low.float().sin().sum(), (x, *module.parameters()))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in found)


class TestTransformers:
    """A sliding window and padding on the left, as decoders have them."""

    @pytest.fixture(scope="class")
    def model(self):
        import families
        from polyhead.integrations import transformers as integration

        torch.manual_seed(0)
        return integration.use(families.DECODERS["mistral"]()).eval()

    @pytest.fixture(scope="class")
    def inputs(self):
        generator = torch.Generator().manual_seed(0)
        real = torch.ones(B, T, dtype=torch.long)
        real[1, :3] = 0
        return {
            "input_ids": torch.randint(3, 99, (B, T), generator=generator),
            "attention_mask": real,
            "use_cache": False,
        }

    def seen(self, output, inputs):
        return output.logits[inputs["attention_mask"].bool()]

    def gradients(self, model, function, inputs):
        total = self.seen(function(**inputs), inputs).sin().sum()
        return torch.autograd.grad(total, list(model.parameters()))

    def test_compiles_as_one_graph_with_the_same_gradients(self, model, inputs):
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found, expected = compiled(**inputs), model(**inputs)
        assert torch.allclose(self.seen(found, inputs), self.seen(expected, inputs), atol=1e-6)
        close(
            self.gradients(model, compiled, inputs), self.gradients(model, model, inputs), atol=1e-4
        )

    @pytest.mark.slow
    @needs_compiler
    def test_inductor_gives_the_same_within_rounding(self, model, inputs):
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True)
        found, expected = compiled(**inputs), model(**inputs)
        assert torch.allclose(self.seen(found, inputs), self.seen(expected, inputs), atol=1e-5)

    def test_a_model_that_would_ignore_it_is_refused_under_compilation_too(self):
        """In a process of its own: torch keeps tensors alive after a compilation that failed."""
        done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True)
        assert re.search(
            "Unsupported(Error)?: .*computes attention itself", done.stdout, re.DOTALL
        ), done

    def test_exports(self, model, inputs):
        with torch.no_grad():
            exported = torch.export.export(model, (), inputs, strict=False).module()
            found, expected = exported(**inputs), model(**inputs)
        assert torch.allclose(self.seen(found, inputs), self.seen(expected, inputs), atol=1e-6)

    def test_vmap_of_grad_gives_the_gradients_of_each_example(self, model, inputs):
        many = torch.stack([inputs["input_ids"], inputs["input_ids"].flip(0)])
        parameters = {key: p.detach() for key, p in model.named_parameters()}

        def total(parameters, ids):
            arguments = {"input_ids": ids, "use_cache": False}
            return functional_call(model, parameters, (), arguments).logits.sin().sum()

        found = vmap(grad(total), in_dims=(None, 0))(parameters, many)
        for i, ids in enumerate(many):
            logits = model(input_ids=ids, use_cache=False).logits
            expected = torch.autograd.grad(logits.sin().sum(), list(model.parameters()))
            close([piece[i] for piece in found.values()], expected, 1e-4)

    def test_gradient_checkpointing_recomputes_the_same(self, model, inputs):
        kept = self.gradients(model, model, inputs)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            again = self.gradients(model, model, inputs)
        finally:
            model.gradient_checkpointing_disable()
            model.eval()
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))

    def test_autocast_stays_near(self, model, inputs):
        exact = self.seen(model(**inputs), inputs)
        with torch.autocast("cpu", torch.bfloat16):
            low = self.seen(model(**inputs), inputs)
        assert 0 < (low.float() - exact).abs().max() < 0.03 * exact.abs().max()
