"""onnxruntime's GroupQueryAttention, decoding into a cache that it shares with its past."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyhead.lab.benchmarks.case import Call
from polyhead.lab.benchmarks.problem import Problem


def group_query_attention(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Call | None:
    """One decoding step: S − 1 keys lie in the cache, the last one comes with the query.

    The operator is causal by itself; on a CPU it knows float32 and float16.
    """
    if problem.dtype is not torch.float32 or problem.queries != 1 or problem.latent is not None:
        return None
    if problem.window or problem.documents or problem.alibi or problem.softcap or problem.sinks:
        return None
    from onnxruntime import OrtValue

    session = _session(problem)
    values = {
        "query": _packed(q),
        "key": _packed(k[:, :, -1:]),
        "value": _packed(v[:, :, -1:]),
        "seqlens_k": torch.full((problem.batch,), problem.keys - 1, dtype=torch.int32),
        "total_sequence_length": torch.tensor(problem.keys, dtype=torch.int32),
    }
    binding = session.io_binding()
    for name, tensor in values.items():
        binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(tensor.numpy()))
    for name, tensor in (("key", k), ("value", v)):
        # One buffer for past and present: nothing is copied between them.
        buffer = OrtValue.ortvalue_from_numpy(tensor.numpy())
        binding.bind_ortvalue_input(f"past_{name}", buffer)
        binding.bind_ortvalue_output(f"present_{name}", buffer)
    binding.bind_output("output")

    def run() -> Tensor:
        session.run_with_iobinding(binding)
        out = torch.from_numpy(binding.get_outputs()[2].numpy())
        return out.view(problem.batch, 1, problem.heads, -1).transpose(1, 2)

    return run


def _packed(x: Tensor) -> Tensor:
    """``[B, N, T, D]`` as ``[B, T, N · D]``."""
    return x.transpose(1, 2).flatten(2).contiguous()


def _session(problem: Problem) -> Any:
    import onnxruntime
    from onnx import TensorProto, helper

    inputs = ["query", "key", "value", "past_key", "past_value", "seqlens_k",
              "total_sequence_length"]  # fmt: skip
    outputs = ["output", "present_key", "present_value"]
    node = helper.make_node(
        "GroupQueryAttention", inputs, outputs, domain="com.microsoft",
        num_heads=problem.heads, kv_num_heads=problem.kv_heads,
    )  # fmt: skip
    integers = {"seqlens_k": ["B"], "total_sequence_length": []}

    def described(name: str) -> Any:
        if name in integers:
            return helper.make_tensor_value_info(name, TensorProto.INT32, integers[name])
        sizes = [f"{name}_{i}" for i in range(4 if "past" in name or "present" in name else 3)]
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)

    graph = helper.make_graph(
        [node], "attention", [*map(described, inputs)], [*map(described, outputs)]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), session_options(), providers=["CPUExecutionProvider"]
    )


def session_options() -> Any:
    """As many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Otherwise its threads keep spinning while the next contestant is measured.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    return options
