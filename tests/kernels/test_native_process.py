"""Native code and its process: memory that runs out, signals, children that were forked."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from polyhead import native

pytestmark = pytest.mark.skipif(
    native.unavailable() is not None, reason=f"no native code here: {native.unavailable()}"
)


def run(program, timeout=120):
    """What a program of its own prints, whose exit status must be 0."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout.split(), found.stderr


def test_too_little_memory_is_an_error_and_leaves_nothing_behind():
    out, _ = run(
        """
        import resource, torch, polyhead as ph
        from polyhead import native
        from polyhead.native.arguments import NO_SCORE_MODS, KVSegment, Weight
        torch.set_num_threads(1)
        code = native.code()

        def held():
            return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

        # The memory to work in grows with the head sizes, the tensors of one key hardly do.
        q, k = torch.randn(1, 1, 1, 1 << 16), torch.randn(1, 1, 1, 1 << 16)
        many = torch.randn(1, 1, 64, 1 << 16)
        out, lse = code.attend(many, [KVSegment(k, k)], 1.0, lse=True)
        grads = torch.zeros_like(out), torch.zeros_like(lse)
        x, wide = torch.randn(8, 1 << 22), torch.randn(1, 1 << 22)

        calls = [
            lambda: code.attend(q, [KVSegment(k, k)], 1.0),
            lambda: code.attend(many, [KVSegment(k, k)], 1.0),
            lambda: code.gradients(many, KVSegment(k, k), 1.0, NO_SCORE_MODS, (out, lse), grads),
            lambda: code.product(x, [Weight(wide, None)]),
        ]
        for number, call in enumerate(calls):
            call()
            before = held()
            more = 64 << 20 if number in (1, 2) else 12 << 20
            left = []
            for _ in range(3):
                found = []
                resource.setrlimit(resource.RLIMIT_AS, (held() + more, -1))
                for _ in range(20):
                    try:
                        call()
                    except MemoryError:
                        found.append("memory")
                    except RuntimeError as error:
                        found.append("torch" if "allocate" in str(error) else str(error))
                resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
                left.append(held() - before)
            # malloc may keep addresses for itself, once; what is lost is lost at every call.
            assert left[2] - left[1] < 1 << 20, (number, left)
            call()
            print(number, len(found), len(set(found)), found[-1])
        """
    )
    for number in range(4):
        assert out[4 * number : 4 * number + 4] == [str(number), "20", "1", "memory"]


def test_an_interrupt_ends_a_long_call():
    out, _ = run(
        """
        import signal, threading, time, os, torch, polyhead as ph
        from polyhead import native
        from polyhead.native.arguments import NO_SCORE_MODS, KVSegment, Weight
        signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell ignores it
        torch.set_num_threads(2)
        code = native.code()
        n = 24_000
        q, k, v = (torch.randn(1, 8, n, 64) for _ in range(3))
        lse = torch.zeros(1, 8, n)
        calls = [
            lambda: code.attend(q, [KVSegment(k, v)], 0.1),
            lambda: code.gradients(q, KVSegment(k, v), 0.1, NO_SCORE_MODS, (q, lse), (q, lse)),
            lambda: code.choose_keys(q, lse, [KVSegment(k[:, :1], v[:, :1])], NO_SCORE_MODS, 9),
            lambda: ph.attention(q.requires_grad_(), k, v),
        ]
        ph.attention(*(torch.randn(1, 8, 200, 64, requires_grad=True) for _ in range(3)))

        def interrupt():
            time.sleep(0.4)
            sent.append(time.process_time())
            os.kill(os.getpid(), signal.SIGINT)

        for call in calls:
            sent = []
            thread = threading.Thread(target=interrupt)
            thread.start()
            try:
                call()
                print("nothing", 0)
            except KeyboardInterrupt:
                print("interrupted", time.process_time() - sent[0])
            thread.join()
            small = torch.randn(1, 2, 40, 16)
            found, exact = (
                ph.attention(*[small] * 3, kernel=name) for name in ("native", "reference")
            )
            assert (found - exact).abs().max() < 1e-5
        """
    )
    assert out[::2] == ["interrupted"] * 4
    # Processor time of both threads: 0.2 to 0.4 s of calls that take more than 10.
    assert all(float(seconds) < 2.0 for seconds in out[1::2])


def test_a_forked_child_computes_on_one_thread_and_says_so():
    out, err = run(
        """
        import multiprocessing, torch, polyhead as ph
        from polyhead.native.arguments import KVSegment
        from polyhead import native
        torch.set_num_threads(2)
        q = torch.randn(2, 8, 200, 32)
        code = native.code()
        expected, _ = code.attend(q, [KVSegment(q, q)], 0.2)

        def child(quiet):
            if quiet:
                torch.set_num_threads(1)
            for _ in range(2):
                found, _ = code.attend(q, [KVSegment(q, q)], 0.2)
            same = bytes(found.numpy()) == bytes(expected.numpy())  # torch.equal hangs here
            print("same" if same else "different", flush=True)

        for quiet in (False, True):
            process = multiprocessing.get_context("fork").Process(target=child, args=(quiet,))
            process.start()
            process.join(60)
            print("ended" if process.exitcode == 0 else "hangs", flush=True)
            if process.exitcode is None:
                process.kill()
        """
    )
    assert out == ["same", "ended", "same", "ended"]
    assert err.count("this process was forked") == 1
    assert "spawn" in err
