import pytest

from relax_infer.config import load_recipe
from relax_infer.contracts.engines import EngineOperation
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import WeightsRef
from relax_infer.engines import EngineGroup, InferenceEngineSpec
from relax_infer.engines.static import WEIGHT_OPERATIONS, validate_static_server_args
from relax_infer.placement import PlacementError, plan_inference_placement
from tests.engines.checkpoints import group_spec


@pytest.mark.parametrize("name", sorted(WEIGHT_OPERATIONS))
def test_what_would_change_the_weights_of_a_static_engine_is_refused(name: str):
    with pytest.raises(RuntimeError, match="STATIC"):
        InferenceEngineSpec("teacher").require_operation(name)


@pytest.mark.parametrize(
    "name",
    [
        *("generate", "release_memory_occupation", "resume_memory_occupation", "abort_request"),
        *("pause_generation", "continue_generation", "flush_cache", "health"),
    ],
)
def test_what_leaves_the_weights_alone_is_allowed(name: str):
    InferenceEngineSpec("genrm").require_operation(name)


async def test_the_refusal_comes_before_any_engine_is_asked(tmp_path):
    """No Ray is connected here: a call to an actor would fail otherwise."""
    spec = group_spec(tmp_path).model_copy(update={"role": "genrm", "weight_source": "STATIC"})
    operation = EngineOperation(
        group=spec,
        operation_id="o",
        fence=FenceToken(counter=1, grant_id="g"),
        weights=WeightsRef(version=1, uri="file:///w", digest="d"),
    )
    with pytest.raises(RuntimeError, match="STATIC"):
        await EngineGroup(spec).onload(operation)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"load-format": "dummy"}, "load-format: a static engine needs its own checkpoint"),
        ({"enable_weights_cpu_backup": False}, "CPU weight backup"),
        ({"enable-weights-cpu-backup": None}, "CPU weight backup"),
        ({"lora-paths": "a=b"}, "LoRA"),
        ({"enable-lora": True}, "LoRA"),
    ],
)
def test_a_configuration_that_loses_its_checkpoint_is_refused(flags, says):
    with pytest.raises(ValueError, match=says):
        validate_static_server_args(flags)
    with pytest.raises(PlacementError) as refused:
        plan_inference_placement(load_recipe("quickstart", {"genrm.engine.server_args": flags}))
    (violation,) = refused.value.violations
    assert violation.field == f"genrm.engine.server_args.{next(iter(flags))}"
    cured = {violation.settings[0][0]: violation.settings[0][1]}
    assert plan_inference_placement(
        load_recipe("quickstart", {"genrm.engine.server_args": flags} | cured)
    )


def test_the_policy_may_have_what_a_static_role_may_not():
    flags = {"rollout.engine.server_args": {"enable-lora": True}}
    assert plan_inference_placement(load_recipe("quickstart", flags))


@pytest.mark.parametrize("flag", ["enable-weights-cpu-backup", "enable_weights_cpu_backup"])
@pytest.mark.parametrize("value", [False, None])
@pytest.mark.parametrize("where", ["rollout.engine", "rollout.server_groups.0"])
def test_the_policy_keeps_its_weight_backup_while_it_sleeps(flag, value, where):
    """Contract 6.4: an explicit False is refused, also where only one group says it."""
    flags = {f"{where}.server_args": {flag: value}}
    if "groups" in where:
        flags = {"rollout.server_groups": [{"server_args": {flag: value}}]}
    with pytest.raises(PlacementError) as refused:
        plan_inference_placement(load_recipe("quickstart", flags))
    (violation,) = refused.value.violations
    assert violation.field == f"{where}.server_args.{flag}"
    assert "CPU weight backup" in str(refused.value)
    by_ending = {"rollout.engine.offload": "restart"}
    assert plan_inference_placement(load_recipe("quickstart", flags | by_ending))
