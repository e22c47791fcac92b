"""When ``auto`` takes our Triton kernels, and what it does where they fail; needs no Triton."""

import time
import warnings

import pytest
import torch

import polyhead as ph
from polyhead.kernels import KERNELS, SwitchedOffError, dispatch
from polyhead.kernels.recurrence import KERNELS as recurrences
from polyhead.kernels.triton import blocks, kernel, self_test, waiting

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(self_test, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def unsupported_reason(dtype=torch.bfloat16, size=128, bits=None):
    return self_test.unsupported_reason(CUDA, dtype, blocks.parts_of(size, size), bits)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(kernel, "_has_triton", lambda: False)
    assert "pip install 'polyhead[gpu]'" in KERNELS["triton"].unavailable()
    monkeypatch.setattr(kernel, "_has_triton", lambda: True)
    monkeypatch.setattr(kernel, "_has_gpu", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "no CUDA device here" in KERNELS["triton"].unavailable()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert KERNELS["triton"].unavailable() is None


def test_each_dtype_and_head_size_is_tested_once_before_it_is_used(monkeypatch):
    tested = []
    monkeypatch.setattr(self_test, "_tried", lambda *asked: tested.append(asked))
    for _ in range(2):
        assert unsupported_reason() is None
        assert unsupported_reason(size=100) is None
        assert unsupported_reason(torch.float32) is None
        assert unsupported_reason(bits=(8, 4)) is None
    sizes = blocks.parts_of(128, 128), blocks.parts_of(100, 100)
    assert tested == [
        (CUDA, torch.bfloat16, sizes[0], None),
        (CUDA, torch.bfloat16, sizes[1], None),
        (CUDA, torch.float32, sizes[0], None),
        (CUDA, torch.bfloat16, sizes[0], (8, 4)),
    ]
    assert not self_test.switched_off()


@pytest.mark.parametrize("wrong", ["attention in bfloat16 differs", RuntimeError("no ptxas")])
def test_what_fails_its_test_is_switched_off_with_one_warning(monkeypatch, wrong):
    def disagreement(*asked):
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    monkeypatch.setattr(self_test, "disagreement", disagreement)
    with pytest.warns(UserWarning, match=r"torch.bfloat16 on cuda are switched off: .*(diff|no p)"):
        assert "switched off" in unsupported_reason()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "switched off" in unsupported_reason()
    assert list(self_test.switched_off()) == ["cuda, bfloat16, heads of 128"]


def test_old_devices_and_captured_graphs_are_left_alone(monkeypatch):
    monkeypatch.setattr(self_test, "_tried", lambda *asked: pytest.fail("tested"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "captured graph" in unsupported_reason()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 7.5" in unsupported_reason()


def test_a_kernel_that_fails_to_compile_hands_the_call_to_the_next(monkeypatch):
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    first = next(iter(KERNELS.values()))
    asked = []

    def run(self, call, plan):
        asked.append(call)
        monkeypatch.setattr(type(first), "auto_skip_reason", lambda self, call: "switched off")
        raise SwitchedOffError("it does not compile here")

    monkeypatch.setattr(type(first), "unavailable", lambda self: None)
    monkeypatch.setattr(type(first), "plan", lambda self, call: None)
    monkeypatch.setattr(type(first), "run", run)
    out = ph.attention(q, k, v, mask=ph.Window(2))
    torch.testing.assert_close(out, ph.attention(q, k, v, mask=ph.Window(2), kernel="tiled"))
    assert len(asked) == 1
    with pytest.raises(SwitchedOffError, match="does not compile"):
        ph.attention(q, k, v, kernel=first.name)
    assert dispatch.explain(q, k, v).kernel != first.name


def test_doctor_says_what_is_switched_off(monkeypatch):
    from polyhead.cli import doctor

    monkeypatch.setattr(
        self_test, "_found", {("cuda:0", torch.float16, blocks.parts_of(64, 64), (8, 4)): "wrong"}
    )
    said = {"cuda:0, float16, heads of 64 in codes of 8 and 4 bits": "wrong"}
    assert doctor.machine()["triton_switched_off"] == said


def test_doctor_says_whether_decoding_is_recorded(monkeypatch):
    from polyhead.cli import doctor

    assert doctor._no_graphs() == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel, "_has_triton", lambda: False)
    assert doctor._no_graphs() == "kernel 'triton' needs Triton: pip install 'polyhead[gpu]'"
    monkeypatch.setattr(kernel, "_has_triton", lambda: True)
    monkeypatch.setattr(kernel, "_has_gpu", lambda: True)
    assert doctor._no_graphs() is None


def test_a_first_call_says_what_it_waits_for_once_it_takes_a_moment(monkeypatch, caplog):
    def tried(*asked):
        with waiting.waiting("a kernel of the test"):
            time.sleep(0.05)

    monkeypatch.setattr(self_test, "_tried", tried)
    assert unsupported_reason() is None
    assert not caplog.records
    monkeypatch.setattr(waiting, "MOMENT", 0.01)
    assert unsupported_reason(size=64) is None
    assert unsupported_reason(size=64) is None
    (said,) = caplog.records
    assert said.levelname == "WARNING"  # Python shows these on stderr unless told otherwise
    words = (
        "compiling and testing Triton kernels on cuda for bfloat16, heads of 64: this call waits"
    )
    assert words in said.getMessage()


def test_a_recurrence_that_fails_to_compile_goes_to_the_next(monkeypatch):
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    triton = type(recurrences["triton"])
    asked = []

    def run(self, call):
        asked.append(call)
        monkeypatch.setattr(triton, "auto_skip_reason", lambda self, call: "switched off")
        raise SwitchedOffError("it does not compile here")

    monkeypatch.setattr(type(recurrences["native"]), "unavailable", lambda self: "not here")
    for name in ("unavailable", "plan", "auto_skip_reason"):
        monkeypatch.setattr(triton, name, lambda *_: None)
    monkeypatch.setattr(triton, "run", run)
    assert ph.explain_recurrence(q, k, v).kernel == "triton"
    out = ph.recurrence(q, k, v)
    torch.testing.assert_close(out, ph.recurrence(q, k, v, kernel="chunked"))
    assert len(asked) == 1
    told = ph.explain_recurrence(q, k, v)
    assert told.kernel == "chunked"
    assert told.refusals["triton"].startswith("only when named explicitly: switched off; our own")
    with pytest.raises(SwitchedOffError, match="does not compile"):
        ph.recurrence(q, k, v, kernel="triton")


def test_each_kind_of_state_is_tested_once_before_it_is_used(monkeypatch):
    tested = []
    monkeypatch.setattr(self_test, "_tried", lambda *asked: tested.append(asked))
    decayed = self_test.States("token", True)
    for _ in range(2):
        for parts in (blocks.state_parts(128, 128), blocks.state_parts(64, 64)):
            assert self_test.unsupported_reason(CUDA, torch.bfloat16, parts, decayed) is None
    assert [asked[2].head for asked in tested] == [128, 64]
    monkeypatch.setattr(self_test, "_tried", lambda *asked: "it differs")
    with pytest.warns(UserWarning, match="it differs"):
        self_test.unsupported_reason(CUDA, torch.float32, parts, self_test.States("", False))
    assert list(self_test.switched_off()) == ["cuda, float32, states of 64 features, no decay"]
