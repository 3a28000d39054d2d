"""``relax-infer plan RECIPE --live``: whether the plan can run on the cluster that is there."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from relax_infer.cli._doctor import server_findings
from relax_infer.cli._local import worker_environment
from relax_infer.cli._recipes import Checked
from relax_infer.contracts.failures import RelaxError
from relax_infer.placement.facts import ClusterFacts, Wanted
from relax_infer.placement.preflight import Finding, judge, wanted

_LOOK_SECONDS = 120.0
_CONNECT_SECONDS = 5.0


async def examine_live(checked: Checked, home: Path) -> list[Finding]:
    """Cluster and server, nothing started; every finding."""
    server, cluster = await asyncio.gather(server_findings(home), _cluster(checked, home))
    if not server:
        cure = "Start a stack with `relax-infer up`, or set TEMPORAL_ADDRESS."
        server = [Finding("temporal server", "missing", "none is named.", cure)]
    return [*cluster, *server]


async def _cluster(checked: Checked, home: Path) -> list[Finding]:
    try:
        variables = worker_environment(home)
    except RelaxError as error:
        return [Finding("ray", "missing", error.message, error.cure)]
    address = variables["RAY_ADDRESS"]
    store = checked.recipe.staging.url or (Path(variables["RELAX_HOME"]) / "store").as_uri()
    asked = wanted(checked.recipe, checked.plan, store)
    cure = "Check RAY_ADDRESS and the network; `relax-infer up` starts what has ended."
    if not await _reachable(address):
        return [Finding("ray", "missing", f"Ray does not answer at {address}.", cure)]
    found = await _look(variables, asked)
    if isinstance(found, str):
        return [Finding("ray", "missing", f"Ray at {address} could not be asked: {found}", cure)]
    ok = Finding("ray", "ok", f"answers at {address}")
    return [ok, *judge(checked.recipe, checked.plan, asked, found)]


async def _look(variables: dict[str, str], asked: Wanted) -> ClusterFacts | str:
    """The cluster's facts, or why there are none.

    In a process of its own: Ray reads its environment once, and this one may have any.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "relax_infer.placement.live"),
        env=variables,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        question = asked.model_dump_json().encode()
        out, errors = await asyncio.wait_for(process.communicate(question), _LOOK_SECONDS)
    except TimeoutError:
        return f"no answer within {_LOOK_SECONDS:.0f} s."
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {process.returncode}."
    return ClusterFacts.model_validate_json(out.splitlines()[-1])


async def _reachable(address: str) -> bool:
    """False for a HOST:PORT where nobody listens; Ray itself would try for a minute."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        return True
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
