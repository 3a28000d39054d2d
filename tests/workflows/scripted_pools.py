"""Placement groups of added replicas in memory, for :mod:`tests.workflows.scripted_world`."""

from collections import Counter

from relax_infer.contracts.engines import AddedReplica, BundleBinding
from relax_infer.contracts.scale import PlacementAsk, added_pool
from tests.workflows.scripted_engines import ScriptedEngines


class ScriptedPools:
    """Which there are, and how often each was made and removed."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = violations
        self.there: dict[str, AddedReplica] = {}
        self.made = Counter[str]()
        self.removed = Counter[str]()

    def bind(self, ask: PlacementAsk) -> AddedReplica:
        name = added_pool(ask.group, ask.replica)
        if name not in self.there:
            self.made[name] += 1
            if self.made[name] > 1:
                self.violations.append(f"{name} is made again")
            first = 100 + 10 * ask.replica
            rows = tuple(
                BundleBinding(bundle=k, node_id="m", node_ip="127.0.0.2", gpu_id=first + k)
                for k in range(ask.group.gpus_per_replica)
            )
            self.there[name] = AddedReplica(replica=ask.replica, placement_group=name, bundles=rows)
        return self.there[name]

    def release(self, ask: PlacementAsk, engines: ScriptedEngines) -> None:
        name = added_pool(ask.group, ask.replica)
        if self.there.pop(name, None) is not None:
            self.removed[name] += 1
        engine = engines.engines.get((ask.group.role, ask.replica))
        if engine is not None and (engine.holds or engine.hides):
            self.violations.append(f"{name} is removed under a living engine")
