"""What Windows and macOS lack, taken away here: polyhead imports, computes, saves and loads.

Every Python of such a test begins with ``sitecustomize.py``. In it the modules of polyhead, and no
others, import neither the modules and functions of POSIX nor the native code, and text in the
system's encoding is an error.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import pytest
import torch

import polyhead as ph
from polyhead import cli
from polyhead._utils import atomic_write
from polyhead._utils.system_memory import system_memory
from polyhead.checkpoints import load_checkpoint
from polyhead.checkpoints.formats import sentence_modules
from polyhead.errors import CheckpointError
from polyhead.families import read_config
from polyhead.models import Transformer
from polyhead.planning.memory import free_memory
from polyhead.serving import grammar_trial
from polyhead.training.state import load_state, save_state

ROOT = Path(__file__).parents[1]
WITHOUT = """
import builtins, os, signal, sys, types, warnings

MODULES = "fcntl grp posix pty pwd readline resource syslog termios tty".split()
LACKING = {
    "os": "chown chroot confstr fchmod fchown fork forkpty getegid geteuid getgid getgroups"
          " getloadavg getpgid getpgrp getpriority getsid getuid killpg lchown mkfifo mknod nice"
          " openpty posix_fadvise posix_fallocate posix_spawn pread pwrite register_at_fork"
          " sched_getaffinity sched_setaffinity sched_yield sendfile setpgid setpriority setsid"
          " statvfs sync sysconf ttyname uname wait wait3 wait4 O_NOFOLLOW O_DIRECTORY O_CLOEXEC",
    "signal": "SIGALRM SIGCHLD SIGHUP SIGKILL SIGPIPE SIGPROF SIGQUIT SIGUSR1 SIGUSR2 alarm"
              " pthread_kill pthread_sigmask setitimer sigwait",
}
SEEN = {}
for name, lacking in LACKING.items():
    SEEN[name] = types.ModuleType(name)
    vars(SEEN[name]).update(vars(sys.modules[name]))
    for each in lacking.split():
        delattr(SEEN[name], each)
ours, sys.modules["polyhead.native._native"] = builtins.__import__, None

def as_seen(name, globals=None, locals=None, fromlist=(), level=0):
    if globals and globals.get("__name__", "").partition(".")[0] == "polyhead" and not level:
        if name in MODULES:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
        if name in SEEN:
            return SEEN[name]
    return ours(name, globals, locals, fromlist, level)

builtins.__import__ = as_seen
warnings.filterwarnings("ignore", category=EncodingWarning)
warnings.filterwarnings("error", category=EncodingWarning, module=r"polyhead\\b")
"""
IMPORTED = """
import importlib, pkgutil, polyhead
for found in pkgutil.walk_packages(polyhead.__path__, "polyhead."):
    if ".triton.device" not in found.name and found.name != "polyhead.native._native":
        importlib.import_module(found.name)
"""


@pytest.fixture
def python(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNDEFAULTENCODING": "1",
        "PYTHONIOENCODING": "cp1252", "POLYHEAD_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return done.stdout.decode("cp1252")

    return run


def test_the_installed_package_works_without_posix(python):
    assert "works: not compiled: " in python(str(ROOT / "tools/smoke.py"), "--pure")


def test_every_module_is_imported_without_posix(python):
    python("-c", IMPORTED)


class Kernel32:
    """GlobalMemoryStatusEx of a machine with 8 GiB, 3 of them free."""

    def GlobalMemoryStatusEx(self, pointer):
        status = pointer._obj
        assert status.length == 64
        status.total, status.free = 8 << 30, 3 << 30
        return self.works


@pytest.mark.parametrize(("works", "memory"), [(1, (8 << 30, 3 << 30)), (0, (None, None))])
def test_windows_says_how_much_memory_is_free(works, memory, monkeypatch):
    kernel = Kernel32()
    kernel.works = works
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    assert system_memory() == memory
    assert free_memory() == (memory[1] or 4 << 30)


def test_macos_says_how_much_memory_there_is(monkeypatch):
    sizes = {"SC_PHYS_PAGES": 500, "SC_PAGE_SIZE": 16384}

    def sysconf(name):
        if name not in sizes:
            raise ValueError("unrecognized configuration name")
        return sizes[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert system_memory() == (500 * 16384, None)
    assert free_memory() == 4 << 30


def test_a_mapped_file_that_windows_does_not_replace_leaves_the_model_as_it_was(
    tmp_path, monkeypatch
):
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 1, "max_position_embeddings": 8}  # fmt: skip
    model = Transformer(read_config({"model_type": "llama", **sizes}, Path("config.json")))
    ph.save(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    replace = os.replace

    def refusing(source, target):
        if Path(target) == tmp_path / "model.safetensors":
            error = PermissionError(errno.EACCES, "Access is denied", source)
            error.winerror = 5
            raise error
        replace(source, target)

    monkeypatch.setattr(atomic_write.os, "replace", refusing)
    with torch.no_grad():
        model.embedding.like.mul_(2)
    with pytest.raises(
        CheckpointError, match="no file that is read-only, open or mapped, as the weights"
    ):
        ph.save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["C:model.safetensors", "C:\\model.safetensors"])
def test_shards_on_another_drive_are_refused(name, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": name}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="which is no file of its directory"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("folder", ["C:elsewhere", "/elsewhere", "..\\elsewhere"])
def test_modules_of_sentences_on_another_drive_are_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sentence_modules, "Path", PureWindowsPath)
    listed = tmp_path / "modules.json"
    row = {"type": "sentence_transformers.models.Pooling", "path": folder}
    listed.write_text(json.dumps([row]), encoding="utf-8")
    with pytest.raises(CheckpointError, match="leads out of the directory"):
        list(sentence_modules._modules(listed))


def test_a_resumed_run_maps_no_file_that_it_will_replace(tmp_path):
    def run():
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return model, optimizer

    save_state(tmp_path / "state.safetensors", *run(), {})
    resumed = run()
    load_state(tmp_path / "state.safetensors", *resumed)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", [-9, 0xC00000FD])
def test_a_grammar_that_ends_the_process_that_tries_it_is_too_complex(code, monkeypatch):
    done = subprocess.CompletedProcess([], code, b"", b"")
    monkeypatch.setattr(grammar_trial.subprocess, "run", lambda *_, **__: done)
    assert grammar_trial.tried(f"start: {code}").startswith("it is too complex")
    monkeypatch.setattr(done, "returncode", 1)
    with pytest.raises(RuntimeError, match="could not be tried"):
        grammar_trial.tried(f"start: {code} again")


class Pipe(io.StringIO):
    def flush(self):
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize(("system", "code"), [("nt", 141), ("posix", 1)])
def test_a_closed_pipe_of_windows_is_an_invalid_argument(system, code, monkeypatch):
    monkeypatch.setattr(cli, "os", SimpleNamespace(**vars(os) | {"name": system}))
    monkeypatch.setattr(sys, "stdout", Pipe())
    assert cli.main(["--version"]) == code
