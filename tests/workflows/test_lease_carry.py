"""What the lease takes along when it continues as new."""

import json

from relax_infer.contracts.lease import LeaseInput, LeaseRequest, RoleResult
from relax_infer.contracts.refs import RunRef
from tests.workflows.scripted_world import plan
from workflows._lease_core import LeaseCore


def test_everything_that_the_lease_knows_goes_along():
    start = LeaseInput(run=RunRef(run="run", store="memory://store"), roles=("rollout", "genrm"))
    lease = LeaseCore(start)
    lease._book.begin_batch("step-1")
    lease._resolved_by["genrm"] = "ada: its node is off"
    lease._groups["rollout"] = plan("run").groups[:1]
    lease._proved["rollout"] = RoleResult(state="READY", weight_version=3)
    lease._doubted.add("genrm")
    lease._asked = 17
    request = LeaseRequest(operation_id="op", method="reconcile")
    lease._operations.begin(request).error = ("Transient", "no")
    carried = json.loads(json.dumps(lease._carry()))
    again = LeaseCore(start.model_copy(update={"carried": carried}))
    assert json.loads(json.dumps(again._carry())) == carried
    for name in ("_resolved_by", "_groups", "_proved", "_doubted", "_asked"):
        assert getattr(again, name) == getattr(lease, name), name
