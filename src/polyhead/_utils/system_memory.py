"""Bytes of memory of this machine, as the system says."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple


class SystemMemory(NamedTuple):
    """Bytes; None where the system does not say: macOS has no count of free pages."""

    total: int | None
    free: int | None


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX, which GlobalMemoryStatusEx of Windows fills."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *(
            (name, ctypes.c_uint64)
            for name in (
                "total", "free", "total_page_file", "free_page_file", "total_virtual",
                "free_virtual", "free_extended_virtual",
            )
        ),
    )  # fmt: skip


def system_memory() -> SystemMemory:
    """The memory of the whole machine, whatever limits this process has."""
    if (windows := getattr(ctypes, "windll", None)) is None:
        return SystemMemory(_pages("SC_PHYS_PAGES"), _pages("SC_AVPHYS_PAGES"))
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not windows.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return SystemMemory(None, None)
    return SystemMemory(status.total, status.free)


def _pages(name: str) -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    try:
        size: int = os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    return size
