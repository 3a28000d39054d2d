from typing import Any

from relax_infer.discovery import ModelSnapshot, ReplicaSnapshot, RoleSnapshot, legacy_document


def replica(engine_id: str, url: str | None, state: str = "READY") -> ReplicaSnapshot:
    return ReplicaSnapshot(engine_id=engine_id, base_url=url, state=state, direct_eligible=True)


def role(**models: dict[str, Any]) -> RoleSnapshot:
    given: dict[str, Any] = {"state": "READY", "route_mode": "DIRECT"}
    return RoleSnapshot(
        role="rollout",
        registry_epoch="e",
        topology_revision=1,
        models={
            key: ModelSnapshot.model_validate(given | {"model_id": key} | m)
            for key, m in models.items()
        },
    )


def test_engines_are_listed_by_rank_with_status_and_address_alone() -> None:
    engines = [
        replica("policy/group-0/replica-10", "http://a:10"),
        replica("policy/group-0/replica-2", "http://a:2", "FAILED"),
        replica("policy/group-0/replica-3", None, "DEAD"),
        replica("policy/group-16/replica-0", "http://b:16", "SLEEPING"),
    ]
    document = legacy_document(
        role(
            policy={
                "engines": engines,
                "route_mode": "SGLANG_ROUTER",
                "router_url": "http://10.0.0.1:3000/",
            }
        )
    )
    assert document == {
        "models": {
            "policy": {
                "router_ip": "10.0.0.1",
                "router_port": 3000,
                "engine_groups": [
                    {
                        "worker_type": "regular",
                        "engines": [
                            {"rank": 2, "status": "dead", "url": "http://a:2"},
                            {"rank": 10, "status": "active", "url": "http://a:10"},
                            {"rank": 16, "status": "active", "url": "http://b:16"},
                        ],
                    }
                ],
                "total_engines": 3,
            }
        },
        "total_engines": 3,
    }


def test_totals_are_of_what_is_listed_over_all_models() -> None:
    document = legacy_document(
        role(
            a={"engines": [replica("x", "http://a:1"), replica("y", None)]},
            b={"engines": [replica("z", "http://b:1"), replica("w", "http://b:2")]},
            pd={"engines": [], "route_mode": "SGLANG_ROUTER", "router_url": "https://r"},
        )
    )
    assert [m["total_engines"] for m in document["models"].values()] == [1, 2, 0]
    assert document["total_engines"] == 3
    assert document["models"]["pd"]["engine_groups"] == []
    assert document["models"]["pd"]["router_port"] == 443
    assert document["models"]["a"]["router_ip"] is None
    ranks = [e["rank"] for e in document["models"]["b"]["engine_groups"][0]["engines"]]
    assert ranks == [0, 1]
