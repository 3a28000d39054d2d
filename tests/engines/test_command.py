"""Command lines, environments, files and small rules; no process is started."""

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import pytest

from relax_infer.contracts.failures import PermanentError, UnconfirmedError
from relax_infer.contracts.fence import FenceMemory, FenceToken
from relax_infer.engines import process, router_command
from relax_infer.engines.command import (
    CPU_SHIM,
    command_line,
    cores_of_ranks,
    environment,
    server_settings,
)
from relax_infer.engines.flags import UNFENCED
from relax_infer.engines.holder import Holder, HolderFiles
from relax_infer.engines.host_processes import shared_files, this_host
from relax_infer.engines.memory import MIB, sum_of_devices
from relax_infer.engines.process import free_ports, free_rendezvous, local_path
from relax_infer.engines.release import MARKER, EngineProcesses
from relax_infer.engines.server import unfenced
from tests.engines.checkpoints import group_spec, make_checkpoint

TOKEN = FenceToken(counter=3, grant_id="g")


def settings(spec, **changes):
    given = {"host": "h", "port": 1, "dist_port": 2, "model_path": "m", "weight_version": 4}
    return server_settings(spec, **{**given, **changes})


@pytest.fixture
def spec(tmp_path: Path):
    make_checkpoint(tmp_path / "version-0", 0)
    return group_spec(tmp_path)


def test_the_spec_wins_over_defaults_but_not_over_what_the_actor_decides(spec):
    changed = spec.model_copy(
        update={"server_args": {"context-length": 64, "sleep-on-idle": None, "port": 9}}
    )
    made = settings(changed)
    assert (made["context-length"], made["sleep-on-idle"], made["port"]) == (64, None, 1)
    assert (made["weight-version"], made["model-path"]) == ("4", "m")


def test_on_a_cpu_the_engine_keeps_the_dtype_of_its_checkpoint(spec):
    assert settings(spec)["dtype"] == "float32"


def test_on_cuda_only_an_engine_that_sleeps_has_the_memory_saver_and_a_copy_of_its_weights(spec):
    saver = settings(spec.model_copy(update={"device": "cuda"}))
    restart = settings(spec.model_copy(update={"device": "cuda", "offload": "restart"}))
    assert saver["enable-memory-saver"] is saver["enable-weights-cpu-backup"] is True
    assert "enable-memory-saver" not in restart
    assert "device" not in saver


def test_a_node_of_several_has_its_rank_and_the_rendezvous_of_all(spec):
    wide = spec.model_copy(update={"gpus_per_replica": 16, "nodes_per_replica": 2})
    made = [settings(wide, node=node, rendezvous="h:7") for node in (0, 1)]
    assert [each["node-rank"] for each in made] == [0, 1]
    assert {(each["nnodes"], each["dist-init-addr"], each["tp-size"]) for each in made} == {
        (2, "h:7", 16)
    }
    command = command_line(wide, made[1], socket=Path("s"), token=TOKEN, request_log=Path("l"))
    assert command[command.index("--fence-nodes") + 1] == "2"
    assert command[command.index("--node-rank") + 1] == "1"


def test_one_node_is_told_of_no_others_whatever_the_spec_says(spec):
    sneaky = spec.model_copy(update={"server_args": {"nnodes": 2, "dist-init-addr": "h:1"}})
    made = settings(sneaky)
    assert (made["nnodes"], made["node-rank"], made["dist-init-addr"]) == (None, None, None)


@pytest.mark.parametrize("name", ["pp-size", "pp_size", "pipeline_parallel_size", "pp"])
def test_pipeline_stages_divide_the_tensor_parallel_size(spec, name):
    staged = spec.model_copy(update={"gpus_per_replica": 8, "server_args": {name: 2}})
    made = settings(staged)
    assert (made["tp-size"], made["pp-size"]) == (4, 2)


def test_a_flag_is_one_however_it_is_written(spec):
    changed = spec.model_copy(update={"server_args": {"context_length": 64}})
    made = settings(changed)
    assert made["context-length"] == 64
    assert not any("_" in name for name in made)
    twice = spec.model_copy(update={"server_args": {"tp_size": 1, "tensor-parallel-size": 1}})
    with pytest.raises(PermanentError, match="tp_size and tensor-parallel-size"):
        settings(twice)


def test_every_rank_of_a_cpu_engine_has_cores_of_its_own_where_there_are_enough(spec, monkeypatch):
    assert cores_of_ranks([0, 1, 2, 3], 2) == "0,1|2,3"
    assert cores_of_ranks([4, 6], 3) == "4|6|4"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    name = "SGLANG_CPU_OMP_THREADS_BIND"
    wide = spec.model_copy(update={"gpus_per_replica": 2})
    assert name not in environment(spec, "i", (0,), {})
    assert environment(wide, "i", (0, 1), {})[name] == "0|1"
    assert environment(wide, "i", (0, 1), {name: "5|6"})[name] == "5|6"
    two = wide.model_copy(update={"nodes_per_replica": 2})
    assert environment(two, "i", (0,), {})[name] == "0,1"


def test_flags_become_arguments(spec):
    command = command_line(
        spec,
        {"a": True, "b": False, "c": None, "d": 0, "e": "x y"},
        socket=Path("s"),
        token=TOKEN,
        request_log=Path("l"),
    )
    assert command[:3] == [sys.executable, "-m", "relax_infer.engines.server"]
    assert command[3:9] == ["--fence-socket", "s", "--fence-token", "3:g", "--request-log", "l"]
    assert command[9:] == ["--a", "--d", "0", "--e", "x y"]


def test_the_environment_carries_the_marker_and_the_engine_s_own_devices(spec):
    inherited = {"CUDA_VISIBLE_DEVICES": "7", "PYTHONPATH": f"a{os.pathsep}{CPU_SHIM}"}
    cuda = environment(spec.model_copy(update={"device": "cuda"}), "i", (2, 3), inherited)
    cpu = environment(spec, "i", (2, 3), inherited)
    assert cuda[MARKER] == cpu[MARKER] == "i"
    assert cuda["SPT_NOENV"] == "1"
    assert (cuda["CUDA_VISIBLE_DEVICES"], cpu["CUDA_VISIBLE_DEVICES"]) == ("2,3", "")
    assert cuda["PYTHONPATH"] == inherited["PYTHONPATH"]
    assert cpu["PYTHONPATH"] == f"{CPU_SHIM}{os.pathsep}a"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grpc_port", 50051),
        ("smg_grpc_mode", True),
        ("tokenizer_worker_num", 2),
        ("disaggregation_mode", "prefill"),
        ("enable_http2", True),
        ("kv_events_config", "{}"),
        ("nnodes", 2),
    ],
)
def test_a_setting_that_opens_another_listener_is_found(name, value):
    harmless = {each: values[0] for each, values in UNFENCED.items()}
    assert unfenced(types.SimpleNamespace(**harmless)) == []
    assert unfenced(types.SimpleNamespace(**{**harmless, name: value})) == [f"{name}={value}"]


def test_the_nodes_of_a_replica_are_fenced_and_no_more_of_them():
    assert unfenced(types.SimpleNamespace(nnodes=2), 2) == []
    assert unfenced(types.SimpleNamespace(nnodes=3), 2) == ["nnodes=3"]
    assert unfenced(types.SimpleNamespace(nnodes=2), 1) == ["nnodes=2"]


def test_a_variable_that_opens_another_listener_is_found(monkeypatch):
    monkeypatch.setenv("SGLANG_RUST_SERVER", "0")
    assert unfenced(object()) == []
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    assert unfenced(object()) == ["SGLANG_RUST_SERVER=1 (environment)"]


def test_the_router_never_sends_a_post_twice():
    command = router_command(1, 2)
    assert {"--disable-retries", "--disable-circuit-breaker"} <= set(command)
    assert command[command.index("--port") + 1] == "1"
    assert command[command.index("--prometheus-port") + 1] == "2"


def test_a_holder_outlives_its_actor_and_tokens_live_as_long_as_their_pool(
    spec, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = HolderFiles(spec, 0, "pool-1")
    holder = Holder(
        engine_id="e",
        processes=EngineProcesses(
            incarnation="i", session=0, tree=(), host=this_host(), not_before=0
        ),
        base_url="u",
        socket="s",
        log="l",
        request_log="r",
        model_path="m",
    )
    files.write_holder(holder)
    files.write_fence(FenceMemory(TOKEN, ended=True))
    assert HolderFiles(spec, 0, "pool-1").fence() == TOKEN
    memory = HolderFiles(spec, 0, "pool-1").fence_memory()
    assert (memory.seen, memory.ended) == (TOKEN, True)
    later = HolderFiles(spec, 0, "pool-2")
    assert (later.holder(), later.fence()) == (holder, None)
    assert HolderFiles(spec, 1, "pool-1").holder() is None
    other_store = spec.model_copy(update={"store": "file:///elsewhere"})
    assert HolderFiles(other_store, 0, "pool-1").holder() is None
    files.remove_holder()
    assert later.holder() is None


def test_what_an_incarnation_left_on_its_host_goes_with_its_holder(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = HolderFiles(spec, 0)
    scratch = files.scratch("abcdef0123")
    (scratch / "tmpabc123").touch()
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.touch()
    other.touch()
    files.write_holder(
        Holder(
            engine_id="e",
            processes=EngineProcesses(
                incarnation="abcdef0123", session=0, tree=(), host=this_host(), not_before=0
            ),
            base_url="u",
            socket="s",
            scratch=str(scratch),
            shared=(str(mine), str(tmp_path / "gone already")),
            log="l",
            request_log="r",
            model_path="m",
        )
    )
    files.remove_holder()
    assert (scratch.exists(), mine.exists(), other.exists()) == (False, False, True)


def test_what_a_process_shares_is_read_from_its_maps():
    with tempfile.NamedTemporaryFile(prefix="relax mapped ", dir="/dev/shm") as file:
        file.write(b"x")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            assert shared_files(os.getpid(), "relax mapped") == {file.name}
            assert shared_files(os.getpid(), "others") == set()
    assert shared_files(2**22 + 1, "") == set(), "there is no such process"


async def test_no_interpreter(spec, tmp_path, monkeypatch):
    """The one that a node lacks is named, and nothing is held there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "log_folder", lambda _: tmp_path / "logs")
    launch = process.Launch(
        group=spec.model_copy(update={"python": "/nowhere/python"}),
        incarnation="abcdef0123",
        token=TOKEN,
        model_path=spec.model_path,
    )
    files = HolderFiles(spec, 0)
    with pytest.raises(PermanentError, match=r"/nowhere/python.*engine\.python"):
        await process.start_server(launch, 0, 0, files)
    assert files.holder() is None


def test_an_incarnation_writes_in_passing_to_a_folder_of_its_own(spec, tmp_path):
    variables = environment(spec, "i", (0,), {"TMPDIR": "/elsewhere"}, scratch=tmp_path)
    assert variables["TMPDIR"] == str(tmp_path)
    assert not variables["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path)), "it is kept"


def test_a_socket_path_that_no_socket_can_have_is_refused_with_what_to_do(
    spec, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = HolderFiles(spec, 0)
    monkeypatch.setattr(files, "folder", Path("/" + "x" * 90))
    with pytest.raises(PermanentError, match="TMPDIR"):
        files.socket("abcdef0123")


def test_free_ports_are_different_and_bindable():
    ports = free_ports("127.0.0.1", 3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_rendezvous_has_the_ports_after_it_free_too():
    host, _, port = free_rendezvous("127.0.0.1").rpartition(":")
    assert host == "127.0.0.1"
    for offset in range(7):
        with socket.socket() as probe:
            probe.bind((host, int(port) + offset))


@pytest.mark.parametrize(
    ("url", "path"),
    [("/a b", "/a b"), ("file:///a%20b", "/a b"), ("s3://bucket/a", None)],
)
def test_a_local_path_is_told_from_a_remote_one(url, path):
    assert local_path(url) == (None if path is None else Path(path))


def test_memory_is_summed_over_the_engine_s_own_devices():
    table = "0, GPU-a, 10\n1, GPU-b, 20\n2, GPU-c, 40\n"
    assert sum_of_devices(table, (0, 2)) == 50 * MIB
    assert sum_of_devices(table, ("GPU-c", 1)) == 60 * MIB
    with pytest.raises(UnconfirmedError, match=r"\[3\]"):
        sum_of_devices(table, (0, 3))
    with pytest.raises(UnconfirmedError, match=r"\['GPU-d'\]"):
        sum_of_devices(table, ("GPU-a", "GPU-d"))
    with pytest.raises(UnconfirmedError, match=r"\[1\]"):
        sum_of_devices("0, GPU-a, 10\n1, GPU-b, [N/A]\n", (0, 1))


def test_importing_the_room_is_cheap_and_needs_neither_torch_nor_ray():
    code = (
        "import sys, relax_infer.engines as room;"
        "room.check_evidence, room.prove_release, room.EngineGroup, room.expected_digest;"
        "sys.exit(bool({'torch', 'ray', 'sglang', 'aiohttp'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
