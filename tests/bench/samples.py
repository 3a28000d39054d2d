"""What staging costs beside plain pyarrow: ``python -m tests.bench.samples [SAMPLES [TOKENS]]``.

Default 4,096 samples of 2,048 tokens; the full size is 65,536. Each measurement runs in a process
of its own: megabytes of the Arrow tables per second, and by how much the process grew at its peak.

- write: a phase's table into the store, beside ``pyarrow.ipc`` into a file;
- write-back: rewards and the Teacher's log-probs read, joined, validated, and the scored file
  written, beside plain pyarrow reading the same three files, replacing the columns and writing;
- read: the scored table, beside ``pyarrow.ipc`` reading the file into memory.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from relax_infer.config import load_recipe
from relax_infer.contracts.refs import RunRef, StagedRef
from relax_infer.samples import StagingStore, layout, load_task
from relax_infer.samples.sample import SCHEMA
from relax_infer.scoring import write_back
from relax_infer.scoring.channels import JUDGED, TAUGHT

SAMPLES, TOKENS = 4096, 2048
PER_GROUP = 8
_SCORES = ("reward", "reward_source", "reward_detail", "teacher_log_probs")


def lists(values: np.ndarray, length: int) -> pa.Array:
    offsets = np.arange(0, len(values) + 1, length, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def log_probs(samples: int, tokens: int) -> pa.Array:
    return lists(-np.random.default_rng(0).random(samples * tokens, dtype=np.float32), tokens)


def generated(samples: int, tokens: int) -> pa.Table:
    rng = np.random.default_rng(1)
    ids = rng.integers(2, 31, samples * tokens, dtype=np.int32)
    columns: dict[str, Any] = {
        "run": ["bench"] * samples,
        "step": np.ones(samples, np.int64),
        "group": np.arange(samples) // PER_GROUP,
        "sample": np.arange(samples) % PER_GROUP,
        "attempt": np.ones(samples, np.int64),
        "rid": [f"bench/1/generated/g{n // PER_GROUP}/s{n}/a1" for n in range(samples)],
        "prompt": ["4071>"] * samples,
        "prompt_ids": lists(np.full(samples * 5, 3, np.int32), 5),
        "answer": ["0147"] * samples,
        "response": ["0147"] * samples,
        "response_ids": lists(ids, tokens),
        "rollout_log_probs": log_probs(samples, tokens),
        "loss_mask": lists(np.ones(samples * tokens, np.int8), tokens),
        "weight_version": np.zeros(samples, np.int64),
        "finish_reason": ["stop"] * samples,
        "metadata": ["{}"] * samples,
    }
    made = [
        pa.array(columns[f.name], f.type) if f.name in columns else pa.nulls(samples, f.type)
        for f in SCHEMA
    ]
    return pa.Table.from_arrays(made, schema=SCHEMA)


def scores(samples: int, tokens: int) -> tuple[pa.Table, pa.Table]:
    identity: dict[str, Any] = {
        "run": ["bench"] * samples,
        "step": np.ones(samples, np.int64),
        "group": np.arange(samples) // PER_GROUP,
        "sample": np.arange(samples) % PER_GROUP,
    }
    rewards = {
        "reward": np.random.default_rng(2).random(samples),
        "reward_source": ["genrm:judge"] * samples,
        "reward_detail": ["y"] * samples,
    }
    judged = pa.table(identity | rewards, schema=JUDGED)
    taught = pa.table(identity | {"teacher_log_probs": log_probs(samples, tokens)}, schema=TAUGHT)
    return judged, taught


def prepared(folder: Path, samples: int, tokens: int) -> None:
    """The files that write-back and read find: in a process of its own, like everything here."""
    store = StagingStore(RunRef(run="bench", store=folder.as_uri()))
    judged, taught = scores(samples, tokens)
    refs = {
        "generated": store.write_table(
            layout.phase_file(1, layout.GENERATED), generated(samples, tokens)
        ),
        "judged": store.write_table(layout.phase_file(1, layout.JUDGED), judged),
        "taught": store.write_table(layout.phase_file(1, layout.TAUGHT), taught),
    }
    (folder / "refs.json").write_text(
        json.dumps({name: ref.model_dump(mode="json") for name, ref in refs.items()})
    )


def measured(work: Callable[[], int]) -> dict[str, float]:
    """Seconds on the wall and of the processor, bytes of the table that came out, and growth of the
    process at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak()
    begin, processor = time.perf_counter(), time.process_time()
    size = work()
    seconds, processor = time.perf_counter() - begin, time.process_time() - processor
    return {"seconds": seconds, "processor": processor, "bytes": size, "grew": _peak() - before}


def _peak() -> float:
    """Bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def ours(what: str, folder: Path, samples: int, tokens: int) -> dict[str, float]:
    store = StagingStore(RunRef(run="bench", store=folder.as_uri()))
    refs = {
        name: StagedRef.model_validate(ref)
        for name, ref in json.loads((folder / "refs.json").read_text()).items()
    }
    if what == "write":
        table = generated(samples, tokens)

        def write() -> int:
            store.write_table("written.arrow", table)
            return table.nbytes

        return measured(write)
    recipe = load_recipe("quickstart", {"staging.max_samples": max(samples, 256)})
    task = load_task(recipe)
    if what == "write-back":
        made: list[StagedRef] = []

        def join() -> int:
            made.append(write_back(store, 1, **refs, task=task, recipe=recipe).staged)
            return (folder / "bench" / layout.scored(1)).stat().st_size

        found = measured(join)
        refs["scored"] = made[0]
        (folder / "refs.json").write_text(
            json.dumps({name: ref.model_dump(mode="json") for name, ref in refs.items()})
        )
        return found
    return measured(lambda: store.read_table(refs["scored"]).nbytes)


def plain(what: str, folder: Path, samples: int, tokens: int) -> dict[str, float]:
    def read(path: Path) -> pa.Table:
        with pa.OSFile(str(path)) as file:
            return pa.ipc.open_file(file).read_all()

    def write(path: Path, table: pa.Table) -> int:
        with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        return table.nbytes

    if what == "write":
        table = generated(samples, tokens)
        return measured(lambda: write(folder / "plain.arrow", table))
    if what == "write-back":

        def join() -> int:
            table, judged, taught = (
                read(folder / "bench" / name)
                for name in (
                    layout.phase_file(1, layout.GENERATED),
                    layout.phase_file(1, layout.JUDGED),
                    layout.phase_file(1, layout.TAUGHT),
                )
            )
            for name in _SCORES:
                source = taught if name == "teacher_log_probs" else judged
                place = table.schema.get_field_index(name)
                table = table.set_column(place, SCHEMA.field(name), source.column(name))
            return write(folder / "plain-scored.arrow", table)

        return measured(join)
    return measured(lambda: read(folder / "bench" / layout.scored(1)).nbytes)


def main() -> None:
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else SAMPLES
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else TOKENS
    print(f"{samples} samples x {tokens} tokens")
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        run_apart("prepare", "", folder, samples, tokens)
        for what in ("write", "write-back", "read"):
            found = {
                who: run_apart(who, what, folder, samples, tokens) for who in ("ours", "plain")
            }
            told = "  ".join(
                f"{who} {each['bytes'] / each['seconds'] / 1e6:6.0f} MB/s,"
                f" {each['processor']:6.2f} s of processor, grew {each['grew'] / 1e6:5.0f} MB"
                for who, each in found.items()
            )
            ratio = found["ours"]["processor"] / found["plain"]["processor"]
            print(
                f"{what:10} {found['ours']['bytes'] / 1e6:6.0f} MB  {told}  {ratio:.1f}x",
                flush=True,
            )


def run_apart(who: str, what: str, folder: str, samples: int, tokens: int) -> dict[str, float]:
    words = [f"--{who}", what, folder, str(samples), str(tokens)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.samples", *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout) if done.stdout else {}


def child() -> None:
    who, what, folder, samples, tokens = sys.argv[1:]
    if who == "--prepare":
        prepared(Path(folder), int(samples), int(tokens))
        return
    measure = ours if who == "--ours" else plain
    print(json.dumps(measure(what, Path(folder), int(samples), int(tokens))))


if __name__ == "__main__":
    child() if len(sys.argv) > 1 and sys.argv[1].startswith("--") else main()
