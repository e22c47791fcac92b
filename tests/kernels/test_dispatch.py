"""What ``auto`` decides on CUDA is what docs/capabilities.md says; no GPU is needed to ask."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dispatch
import polyhead as ph
from capabilities import DISPATCH, PAGE
from polyhead.kernels import KERNELS, flex


def test_the_table_of_decisions_on_a_gpu_is_the_page_s(monkeypatch):
    found = dispatch.decisions(monkeypatch.setattr)
    table = dispatch.table(found)
    page = PAGE.read_text(encoding="utf-8")
    start = page.index(table[0])
    assert page[start:].partition("\n\n")[0].splitlines() == table
    assert "\n".join(DISPATCH) in page
    for name in ("window", "documents", "softcap", "ALiBi", "T5 bias", "lse", "sinks"):
        assert found[name] == ("triton", "triton", "flex", "flex")


REASONS = {
    "window": {"sdpa": "mask=Causal() & Window(1024)", "triton": "switched off: in this table"},
    "dropout": {"flex": "dropout"},
    "float64, window": {"flex": "float64", "triton": "float64"},
    "an explicit tensor": {"flex": "not among what is known to be right on a GPU"},
}
"""Words of why a kernel does not run."""


def test_reasons_on_a_gpu_name_what_decides(monkeypatch):
    dispatch.decisions(monkeypatch.setattr)  # ours are off since
    with FakeTensorMode():
        for name, case in dispatch.CASES.items():
            said = dispatch.explained(case, learns=False)
            assert set(said.refusals) == set(KERNELS) - {said.kernel}
            assert all(said.refusals.values())
            for kernel, words in REASONS.get(name, {}).items():
                assert words in said.refusals[kernel]


def test_a_fake_call_has_the_shapes_of_a_real_one(monkeypatch):
    monkeypatch.setattr(flex, "_has_triton", lambda: True)
    monkeypatch.setattr(flex, "_compiles_for_cpu", lambda: True)
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, n, s, 64, device="cuda") for n, s in ((8, 300), (2, 500), (2, 500))
        )
        asked = {"mask": ph.Causal() & ph.Window(9), "return_lse": True}
        said = ph.explain(q, k, v, **asked)
        assert said.kernel == "flex"
        assert "lower priority" in said.refusals["tiled"]
        out, lse = ph.attention(q, k, v, **asked)
        assert (out.shape, out.dtype, str(out.device)) == (q.shape, q.dtype, "cuda:0")
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        monkeypatch.setattr(flex, "_has_triton", lambda: False)
        assert ph.explain(q, k, v, **asked).kernel == "tiled"
        with pytest.raises(ph.UnsupportedError, match="pip install triton"):
            ph.explain(q, k, v, **asked, kernel="flex")
