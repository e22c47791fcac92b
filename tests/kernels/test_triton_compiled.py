"""Our Triton kernels compile for GPUs that are not here, and fit their registers.

Nothing runs: Triton goes from the source to the machine code of compute capability 8.0 (A100), 8.6,
8.9 (smaller devices of its time, and Ada), 9.0 (H100), 10.0 (B200) and 12.0 (RTX 50) and tells what
that takes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyhead.kernels.triton import blocks

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("triton_compiling.py")
SHARED = {
    capability: most * 1024
    for most, capabilities in {163: (80,), 99: (86, 89, 120), 227: (90, 100)}.items()
    for capability in capabilities
}
"""Bytes of shared memory that a program may have there."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles_and_attention_that_auto_may_take_spills_no_register(
    capability, tmp_path, capsys
):
    # Not interpreted, in a process of its own: Triton decides when it is imported.
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, str(capability)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    of_attention = {"attend", "merge", "keys_pass", "queries_pass"}
    of_states = {"steps", "chunk_pairs", "chunks"}
    assert {each["kernel"] for each in built} == of_attention | of_states
    assert len(built) > 60
    # A state takes all registers: ptxas spills a few numbers, and one where half are free.
    most = {kernel: 64 if kernel in of_states else 0 for kernel in of_attention | of_states}
    spilling = [x for x in built if x["fits"] and x["spilled"] > most[x["kernel"]]]
    lines = [f"{x['case']}: {x['kernel']}" for x in spilling]
    assert not lines, "\n".join(lines)
    assert divmod(capability, 10) in blocks.KNOWN
    assert max(each["shared"] for each in built if each["fits"]) <= SHARED[capability]
    assert max(each["registers"] for each in built) <= 255
    products = [each for each in built if each["kernel"] in of_attention - {"merge"}]
    assert all(each["wgmma"] or each["tcgen05"] or each["mma"] for each in products)
    many = [each for each in products if "float16 64" in each["case"] and "T=512" in each["case"]]
    assert all(each["wgmma"] == (capability == 90) for each in many)
    assert all(each["tcgen05"] == (capability == 100) for each in many)
    with capsys.disabled():
        most = max(built, key=lambda each: each["shared"])
        print(f"\nsm_{capability}: {len(built)} kernels, at most {most['shared']:,} bytes shared")
