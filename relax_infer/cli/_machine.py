"""What this machine has."""

import re
from pathlib import Path

_GIB = 1 << 30
_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def gpu_count() -> int:
    """NVIDIA devices, without asking the driver."""
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def free_memory_gib() -> float:
    """GiB that processes started here may use, the container's limit included."""
    text = Path("/proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    free = int(found[1]) * 1024 if found else 0
    for limit, used in _LIMITS:
        try:
            allowed, taken = Path(limit).read_text().strip(), int(Path(used).read_text())
        except OSError:
            continue
        if allowed != "max":
            free = min(free, max(int(allowed) - taken, 0))
    return free / _GIB
