"""``python -m workers.local`` without its servers: writes the record, prints, obeys SIGTERM.

The one double of the local stack's process. test_real_stack.py holds the commands against the real
one. What it does is told by variables: STACK_RECORD (the record it writes), STACK_REFUSES (a text,
exit code 2), STACK_WAITS (a file that it makes before it waits to be ended).
"""

import os
import signal
import sys
from pathlib import Path


def main() -> int:
    command, _, home = sys.argv[1:4]
    record = Path(home) / "stack.json"
    with Path(os.environ["STACK_CALLS"]).open("a") as calls:
        calls.write(" ".join(sys.argv[1:]) + "\n")
    if command == "down":
        record.unlink(missing_ok=True)
        print("Ended temporal, ray, worker.", flush=True)
        return 0
    if text := os.environ.get("STACK_REFUSES"):
        print(text, file=sys.stderr)
        return 2
    if waits := os.environ.get("STACK_WAITS"):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        Path(waits).touch()
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("Interrupted; nothing is left running.", file=sys.stderr)
            return 130
    if record.exists():
        print("The stack runs already.", flush=True)
        return 0
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(os.environ["STACK_RECORD"])
    print("Temporal answers.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
