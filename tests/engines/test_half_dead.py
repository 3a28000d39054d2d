"""A process whose first thread has ended is not gone while another thread lives."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from relax_infer.engines import host_processes

_FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_zombie_leader_with_a_living_thread_still_counts():
    child = subprocess.Popen(
        [sys.executable, "-c", _FIRST_THREAD_ENDS], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 10
        while "(zombie)" not in Path(f"/proc/{child.pid}/status").read_text():
            assert time.monotonic() < deadline, "the first thread did not end"
        row = host_processes.process(child.pid)
        assert row is not None
        assert row.stamp.pid == child.pid
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.stdout.close()
    deadline = time.monotonic() + 10
    while host_processes.process(child.pid) is not None:
        assert time.monotonic() < deadline, "it is still shown after it was killed"
    child.wait()
