"""What Ray's control plane says of nodes and placement groups. Every call blocks for one answer."""

from typing import Any

from relax_infer.placement.room import NodeRoom


def group_table() -> dict[str, Any]:
    """By id: name, state, bundles, and the node of each bundle."""
    from ray.util import placement_group_table

    return placement_group_table()


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
