"""What the driver says of a node's devices, and what is made of it before a server is started."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_infer.contracts.engines import BundleBinding, EngineGroupSpec, EngineOperation
from relax_infer.contracts.failures import TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceMemory, FenceToken
from relax_infer.engines import node as module
from relax_infer.engines import nodes as nodes_module
from relax_infer.engines import replica as replica_module
from relax_infer.engines.memory import MIB, memory_in_use
from relax_infer.engines.node import EngineNode
from relax_infer.engines.replica import EngineReplica
from relax_infer.machines import ReplicaState
from tests.engines.checkpoints import group_spec
from tests.engines.test_nodes import NearFollower

BEFORE, RESIDUAL = 100 * MIB, 300 * MIB
ON_A_GPU = {"device": "cuda", "residual_memory": RESIDUAL}


class Devices:
    """Of a host whose servers and whose driver are pretended."""

    in_use: int | None = BEFORE
    back_after = 0
    """Looks until it is all free again; 0: it stays as it is."""

    async def memory_in_use(self, bundles: object) -> int | None:
        self.back_after -= 1
        if self.back_after == 0:
            self.in_use = BEFORE
        return self.in_use

    async def start(self, *_: object) -> Any:
        processes = SimpleNamespace(incarnation="i", session=1, tree=())
        holder = SimpleNamespace(processes=processes, memory_before=self.in_use, log="l")
        return SimpleNamespace(holder=holder, lost=lambda: None)

    async def end(self, *_: object) -> None: ...

    async def run(self, spec: EngineGroupSpec, at: int, then: int) -> None:
        """A server that was started at a use of ``at`` bytes and left ``then`` when it ended."""
        node = EngineNode(spec, 0, 0)
        self.in_use = at
        await node.start(launch_of(spec))
        self.in_use = then
        await node.end()


def launch_of(spec: EngineGroupSpec) -> Any:
    return SimpleNamespace(group=spec)


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Devices()
    monkeypatch.setattr(module, "memory_in_use", made.memory_in_use)
    monkeypatch.setattr(module, "start_server", made.start)
    monkeypatch.setattr(module, "end_engine", made.end)
    return made


async def test_no_server_is_started_before_the_last_one_s_memory_came_back(
    devices: Devices, tmp_path: Path
) -> None:
    """pains 5, 6: all of its processes are gone and the memory is not free; what is rebuilt there
    would run out of it. A recovery tries again, later."""
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    node = EngineNode(spec, 0, 0)
    launch: Any = SimpleNamespace(group=spec)
    devices.in_use = BEFORE
    await node.start(launch)
    devices.in_use = BEFORE + RESIDUAL + MIB
    await node.end()
    for _ in range(2):
        with pytest.raises(TransientError, match=f"{devices.in_use} bytes in use"):
            await node.start(launch)
        assert node.process is None
    devices.in_use = BEFORE + RESIDUAL
    await node.start(launch)
    assert node.process is not None


async def test_an_actor_that_is_made_anew_knows_what_the_last_server_still_has_to_give_back(
    devices: Devices, tmp_path: Path
) -> None:
    """A recovery ends the actors of what it has proved gone, and launches in new ones."""
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    await devices.run(spec, BEFORE, BEFORE + RESIDUAL + MIB)
    files = EngineNode(spec, 0, 0).files
    path = files.owed_path
    assert path.parent == files.folder
    for _ in range(2):
        with pytest.raises(TransientError, match=f"{devices.in_use} bytes in use") as raised:
            await EngineNode(spec, 0, 0).start(launch_of(spec))
        assert f"remove {path}" in str(raised.value)
    await EngineNode(spec, 1, 0).start(launch_of(spec))  # of another replica it says nothing
    devices.in_use = BEFORE + RESIDUAL
    await EngineNode(spec, 0, 0).start(launch_of(spec))
    assert not path.exists(), "its release is proved"


async def test_what_was_given_back_is_not_asked_for_again(devices: Devices, tmp_path: Path) -> None:
    """Another role may have the devices by then."""
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    await devices.run(spec, BEFORE, BEFORE + RESIDUAL)
    devices.in_use = BEFORE + 2 * RESIDUAL
    await EngineNode(spec, 0, 0).start(launch_of(spec))


async def test_a_person_s_word_is_about_the_memory_too(devices: Devices, tmp_path: Path) -> None:
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    await devices.run(spec, BEFORE, BEFORE + RESIDUAL + MIB)
    await EngineNode(spec, 0, 0).forget()
    await EngineNode(spec, 0, 0).start(launch_of(spec))


TOKEN = FenceToken(counter=1, grant_id="g")
OWED = BEFORE + RESIDUAL + MIB


def operation(spec: EngineGroupSpec, **changes: Any) -> EngineOperation:
    return EngineOperation(group=spec, operation_id="o", fence=TOKEN, **changes)


@pytest.mark.parametrize("kind", ["offload", "stop"])
async def test_a_dead_replica_gives_evidence_only_once_its_memory_is_back(
    kind: str, devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pains 5, 6: its GPUs go to another role on that evidence, which would run out of memory."""
    monkeypatch.setattr(replica_module, "_GIVE_BACK_SECONDS", 0.0)
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    await devices.run(spec, BEFORE, OWED)
    replica = EngineReplica(spec, 0)
    let_go = getattr(replica, kind)
    path = replica.files.owed_path
    for _ in range(2):
        with pytest.raises(UnconfirmedError) as raised:
            await let_go(operation(spec))
        assert replica.state is ReplicaState.DEAD
        for said in (f"{OWED} bytes in use", "node 127.0.0.1", "nvidia-smi", f"remove {path}"):
            assert said in str(raised.value)
    devices.in_use = BEFORE + RESIDUAL
    assert (await let_go(operation(spec))).proof == "process_gone"
    assert not path.exists()
    devices.in_use = OWED  # another role has them now
    assert (await let_go(operation(spec))).proof == "process_gone"


async def test_memory_that_comes_back_a_little_later_is_waited_for(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "_BETWEEN_LOOKS", 0.0)
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    await devices.run(spec, BEFORE, OWED)
    devices.back_after = 3
    evidence = await EngineReplica(spec, 0).offload(operation(spec))
    assert evidence is not None
    assert devices.in_use == BEFORE


async def test_where_nobody_can_tell_any_more_what_is_in_use_nothing_is_given_back(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's tool was there before the launch, and is not now."""
    monkeypatch.setattr(replica_module, "_GIVE_BACK_SECONDS", 0.0)
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    await devices.run(spec, BEFORE, OWED)
    devices.in_use = None
    with pytest.raises(UnconfirmedError, match=r"nvidia-smi, which told .* is not on PATH"):
        await EngineReplica(spec, 0).offload(operation(spec))
    with pytest.raises(TransientError, match="is not on PATH"):
        await EngineNode(spec, 0, 0).start(launch_of(spec))


async def test_a_stop_within_a_grant_gives_no_evidence_and_waits_for_no_memory(
    devices: Devices, tmp_path: Path
) -> None:
    """A rebuild follows; its own launch waits, and nobody else is granted meanwhile."""
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    await devices.run(spec, BEFORE, OWED)
    assert await EngineReplica(spec, 0).stop(operation(spec, ends_grant=False)) is None


async def test_what_let_go_before_is_not_judged_by_what_others_use(
    devices: Devices, tmp_path: Path
) -> None:
    """It slept, its grant had ended, and it was ended while another role had the GPUs."""
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    await devices.run(spec, BEFORE, OWED)
    replica = EngineReplica(spec, 0)
    replica.files.write_fence(FenceMemory(TOKEN, ended=True))
    evidence = await replica.stop(operation(spec))
    assert evidence is not None


async def test_the_memory_of_every_node_has_to_be_back(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "_GIVE_BACK_SECONDS", 0.0)
    bundles = tuple(
        BundleBinding(bundle=k, node_id=f"n{k}", node_ip=f"127.0.0.{k + 1}", gpu_id=0)
        for k in (0, 1)
    )
    sizes: dict[str, Any] = {"gpus_per_replica": 2, "nodes_per_replica": 2}
    spec = group_spec(tmp_path, bundles=bundles, **sizes).model_copy(update=ON_A_GPU)
    follower = EngineNode(spec, 0, 1)
    devices.in_use = BEFORE
    await follower.start(launch_of(spec))
    devices.in_use = OWED
    await follower.end()
    near = NearFollower(spec)
    monkeypatch.setattr(near.actor._node, "check_place", lambda **_: None)
    replica = EngineReplica(spec, 0, "", [near])
    with pytest.raises(UnconfirmedError, match=r"on node 1 its last server.*node 127\.0\.0\.2"):
        await replica.offload(operation(spec))
    devices.in_use = BEFORE
    evidence = await replica.offload(operation(spec))
    assert evidence is not None


async def test_devices_that_it_had_before_owe_it_nothing(devices: Devices, tmp_path: Path) -> None:
    """It was bound anew, and others are on the GPUs where it was."""
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    await devices.run(spec, BEFORE, BEFORE + RESIDUAL + MIB)
    elsewhere = tuple(each.model_copy(update={"gpu_id": 5}) for each in spec.bundles)
    spec = spec.model_copy(update={"bundles": elsewhere})
    await EngineNode(spec, 0, 0).start(launch_of(spec))


async def test_the_first_server_is_not_judged_by_what_others_use(
    devices: Devices, tmp_path: Path
) -> None:
    spec = group_spec(tmp_path).model_copy(update=ON_A_GPU)
    devices.in_use = BEFORE + 2 * RESIDUAL
    launch: Any = SimpleNamespace(group=spec)
    await EngineNode(spec, 0, 0).start(launch)


async def test_a_device_is_asked_about_by_its_uuid_where_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number has become another device's since it was bound."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\nprintf "0, GPU-b, 7\\n1, GPU-a, 5\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    bound = BundleBinding(bundle=0, node_id="n", node_ip="127.0.0.1", gpu_id=0)
    assert await memory_in_use((bound,)) == 7 * MIB
    named = bound.model_copy(update={"gpu_uuid": "GPU-a"})
    assert await memory_in_use((named,)) == 5 * MIB
