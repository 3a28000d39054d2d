"""What Ray's control plane says of nodes and placement groups. Every call blocks for one answer."""

from typing import Any

from relax_infer.placement.room import NodeRoom


def group_table() -> dict[str, Any]:
    """By id: name, state, bundles, and the node of each bundle."""
    from ray.util import placement_group_table

    return placement_group_table()


def is_detached(identity: str) -> bool | None:
    """Whether the group outlives the job that made it; None: Ray does not tell. Its table of groups
    leaves it out."""
    import ray
    from ray._private.state import state
    from ray.core.generated import gcs_pb2

    connect: Any = getattr(state, "_connect_and_get_accessor", None)
    if connect is None:
        return None
    group = ray.PlacementGroupID(bytes.fromhex(identity))
    told = connect().get_placement_group_info(group)
    if told is None:
        return None
    messages: Any = gcs_pb2
    return messages.PlacementGroupTableData.FromString(told).is_detached


def living_nodes() -> list[NodeRoom]:
    """With what is free on each, and who has bundles there."""
    import ray
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    holders: dict[str, list[str]] = {}
    for identity, entry in group_table().items():
        if entry["state"] != "REMOVED":
            for node in sorted(set(entry["bundles_to_node_id"].values())):
                holders.setdefault(node, []).append(entry["name"] or identity)
    return [
        NodeRoom(
            node_id=node["NodeID"],
            node_ip=node["NodeManagerAddress"],
            gpus=node["Resources"].get("GPU", 0.0),
            cpus=node["Resources"].get("CPU", 0.0),
            free_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
            free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            holders=tuple(holders.get(node["NodeID"], ())),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
