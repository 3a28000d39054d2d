"""Looks at the open runs of the namespace, for the metrics: visibility, queries, step records.

What is told is what workflows and files say now, not what this process happened to see: it is right
again one look after any process was started anew. A look costs one list and about four queries a
run; the data path of a run never waits for it.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowExecution, WorkflowQueryFailedError
from temporalio.common import SearchAttributeKey
from temporalio.service import RPCError, RPCStatusCode

from relax_infer.contracts.engines import GroupSnapshot
from relax_infer.contracts.lease import LeaseStatus
from relax_infer.contracts.refs import RunRef
from relax_infer.contracts.run import RunStatus, StepRecord
from relax_infer.samples import StagingStore
from relax_infer.telemetry.run_metrics import RunMetrics, Seen

log = logging.getLogger(__name__)

_QUERY = timedelta(seconds=5)
_OPEN = "WorkflowType = 'TrainingRun' AND ExecutionStatus = 'Running'"
_STEP = SearchAttributeKey.for_int("RelaxStep")
_STATE = SearchAttributeKey.for_keyword("RelaxState")
_ROLE = SearchAttributeKey.for_keyword("RelaxRole")
TARGETS = "prometheus-targets.json"
"""In RELAX_HOME: where the open runs' gateways and engines answer, for Prometheus's file_sd."""


class RunWatch:
    """Looks again and again until it is cancelled."""

    def __init__(self, client: Client, metrics: RunMetrics, *, every: float) -> None:
        """``every``: seconds from one look's end to the next one's begin."""
        self._client, self._metrics, self._every = client, metrics, every
        self._known: dict[str, int] = {}
        """Newest step of each run whose record was read."""
        self._targets = ""

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except RPCError as error:  # Temporal is away: the next look may find it again
                log.warning("runs cannot be listed for the metrics: %s", error)
            await asyncio.sleep(self._every)

    async def look(self) -> None:
        """All open runs, once."""
        began = time.monotonic()
        runs = [run.id async for run in self._client.list_workflows(_OPEN)]
        self._metrics.keep(runs)
        self._known = {run: step for run, step in self._known.items() if run in runs}
        seen: list[Seen] = []
        for run in runs:
            try:
                seen.append(await self._seen(run))
            except (RPCError, WorkflowQueryFailedError, OSError, ValueError) as error:
                self._metrics.missed(run)
                log.warning("run %s cannot be looked at for the metrics: %s", run, error)
        for each in seen:
            self._metrics.see(each)
        await asyncio.to_thread(self._write_targets, seen)
        self._metrics.took(time.monotonic() - began)

    async def _seen(self, run: str) -> Seen:
        status = await self._ask(run, "status", RunStatus)
        lease, groups = None, list[GroupSnapshot]()
        if status.lease is not None:
            lease = await self._ask_if_begun(status.lease, "state", LeaseStatus)
        for role in status.roles.values():
            groups += await self._ask_if_begun(role, "replicas", list[GroupSnapshot]) or ()
        steps, recoveries = await self._children(run)
        return Seen(
            at=time.time(),
            status=status,
            lease=lease,
            groups=tuple(groups),
            steps=tuple(steps),
            recoveries=tuple(recoveries),
            records=await asyncio.to_thread(self._records, status),
        )

    async def _ask(self, workflow: str, query: str, gives: Any) -> Any:
        handle = self._client.get_workflow_handle(workflow)
        return await handle.query(query, result_type=gives, rpc_timeout=_QUERY)

    async def _ask_if_begun(self, workflow: str, query: str, gives: Any) -> Any:
        """None while the run has not begun it, or has ended it already."""
        try:
            return await self._ask(workflow, query, gives)
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise

    async def _children(
        self, run: str
    ) -> tuple[list[tuple[int, str, float]], list[tuple[str, str]]]:
        """Open steps, and every recovery there ever was."""
        steps: list[tuple[int, str, float]] = []
        recoveries: list[tuple[str, str]] = []
        query = (
            f"RelaxRun = '{run}' AND ((WorkflowType = 'TrainingStep' AND ExecutionStatus ="
            " 'Running') OR WorkflowType = 'ReplicaRecovery')"
        )
        async for child in self._client.list_workflows(query):
            state = _told(child, _STATE) or "unknown"
            if child.workflow_type == "TrainingStep":
                steps.append((_told(child, _STEP) or 0, state, child.start_time.timestamp()))
            else:
                recoveries.append((_told(child, _ROLE) or "unknown", state))
        return steps, recoveries

    def _records(self, status: RunStatus) -> tuple[StepRecord, ...]:
        """Of steps that finished since the look before; of a run seen first, of its last one."""
        if status.store is None or not status.progress:
            return ()
        run = status.run
        known = self._known.get(run, status.progress[-1].step - 1)
        store = StagingStore(RunRef(run=status.run, store=status.store))
        found: list[StepRecord] = []
        for step in [p.step for p in status.progress if p.step > known and p.record is not None]:
            try:
                record = store.read_json(f"steps/{step}/record.json")
                found.append(StepRecord.model_validate(record))
            except OSError as error:  # another machine's store: the rest can be told all the same
                log.warning("the record of step %d of %s cannot be read: %s", step, run, error)
        self._known[run] = status.progress[-1].step
        return tuple(found)

    def _write_targets(self, seen: Iterable[Seen]) -> None:
        home = os.environ.get("RELAX_HOME")
        text = json.dumps([target for each in seen for target in targets_of(each)], indent=1)
        if home is None or text == self._targets:
            return
        path = Path(home) / TARGETS
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(text)
        draft.replace(path)
        self._targets = text


def targets_of(seen: Seen) -> list[dict[str, Any]]:
    """Gateway and engines of a run, as file_sd wants them."""
    found: list[dict[str, Any]] = []
    if seen.status.gateway_url:
        scheme, _, address = seen.status.gateway_url.partition("://")
        labels = {"job": "relax-gateway", "run": seen.status.run, "__scheme__": scheme}
        found.append({"targets": [address], "labels": labels})
    engines = [r.base_url for group in seen.groups for r in group.replicas if r.base_url]
    if engines:
        addresses = sorted(url.partition("://")[2].rstrip("/") for url in engines)
        labels = {"job": "relax-guard", "__metrics_path__": "/guard/metrics"}
        found.append({"targets": addresses, "labels": labels})
    return found


def _told(child: WorkflowExecution, key: SearchAttributeKey[Any]) -> Any:
    return child.typed_search_attributes.get(key)
