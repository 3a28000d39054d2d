import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["discovery", "gateway", "placement"])
def test_importing_the_package_loads_nothing_heavy(package: str) -> None:
    heavy = ["torch", "ray", "sglang", "aiohttp", "transformers", "temporalio", "uvicorn"]
    code = (
        f"import sys, relax_infer.{package}\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["discovery", "gateway", "placement"])
def test_every_exported_name_is_there(package: str) -> None:
    module = __import__(f"relax_infer.{package}", fromlist=["*"])
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_the_package_has_one_form_of_discovery_and_no_second_way_to_pick_an_engine() -> None:
    """Findings F10 to F13: leftovers of earlier discoveries are not made again."""
    from relax_infer import discovery

    assert set(discovery.__all__) == {
        *("SCHEMA_VERSION", "Role", "State", "RouteMode", "WeightSource", "Policy"),
        *("ReplicaSnapshot", "ModelSnapshot", "RoutingSpec", "RoleSnapshot"),
        *("InferenceRegistry", "RoleDiscovery", "etag_of", "legacy_document"),
        *("Generations", "engine_id"),
        *("RouteResolver", "RouteTarget", "InferenceRoutingError"),
        *("InferenceClient", "generate_with_discovery", "close_loop_inference_clients"),
    }
    known = set(discovery.RoleSnapshot.model_fields)
    assert known == {
        *("schema_version", "role", "registry_epoch", "topology_revision", "routing", "models")
    }
    assert set(discovery.ReplicaSnapshot.model_fields) == {
        *("engine_id", "base_url", "state", "direct_eligible", "generation")
    }
