"""What the Temporal SDK attaches to its lines becomes what they are about."""

import json
import logging

from relax_infer.telemetry import FIELDS
from relax_infer.telemetry.logs import formatter
from workers._logs import from_temporal


def line(**extra: object) -> dict[str, object]:
    record = logging.makeLogRecord(
        {"name": "temporalio.activity", "levelname": "WARNING", "levelno": 30, "msg": "failed"}
        | {"_ray_timestamp_ns": 17, **extra}
    )
    return json.loads(formatter("json", [from_temporal]).format(record))


def test_a_line_of_the_sdk_about_an_activity_names_its_run_and_step():
    told = line(
        temporal_activity={
            "workflow_id": "run-1.step-3",
            "activity_type": "judge_samples",
            "attempt": 2,
            "task_queue": "relax",
        }
    )
    assert [told[name] for name in FIELDS[:2]] == ["run-1", 3]
    assert (told["activity"], told["attempt"]) == ("judge_samples", 2)
    assert "temporal_activity" not in told
    assert not any(key.startswith("_") for key in told)


def test_a_line_of_a_workflow_names_what_its_id_tells():
    told = line(temporal_workflow={"workflow_id": "run-1.genrm.judge.replica-0.recovery-1"})
    assert (told["run"], told["role"], told["replica"]) == ("run-1", "genrm", 0)
    assert told["workflow"] == "run-1.genrm.judge.replica-0.recovery-1"
