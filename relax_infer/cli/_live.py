"""``relax-infer plan RECIPE --live``: whether the plan can run on the cluster that is there."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from relax_infer.cli._doctor import server_findings
from relax_infer.cli._local import worker_environment
from relax_infer.config import Recipe
from relax_infer.contracts.failures import RelaxError
from relax_infer.placement import InferencePlacementPlan
from relax_infer.placement.facts import ClusterFacts, Wanted
from relax_infer.placement.findings import Finding
from relax_infer.placement.preflight import judge, wanted

_LOOK_SECONDS = 150.0
_CONNECT_SECONDS = 5.0


async def examine_live(
    recipe: Recipe, plan: InferencePlacementPlan | None, home: Path
) -> list[Finding]:
    """Cluster and server, nothing started; every finding. ``plan``: None where there is none."""
    server, cluster, others = await asyncio.gather(
        server_findings(home), _cluster(recipe, plan, home), _served_elsewhere(recipe)
    )
    if not server:
        cure = "Start a stack with `relax-infer up`, or set TEMPORAL_ADDRESS."
        server = [Finding("temporal server", "missing", "none is named.", cure)]
    return [*cluster, *others, *server]


async def _served_elsewhere(recipe: Recipe) -> list[Finding]:
    """Judges and Teachers that somebody else runs: whether they answer."""
    urls = {
        role: section.url
        for role, section in (("genrm", recipe.genrm), ("teacher", recipe.teacher))
        if section is not None and section.url is not None
    }
    answers = await asyncio.gather(*(_answers(url) for url in urls.values()))
    return [
        Finding(role, "ok", f"{url} answers")
        if there
        else Finding(role, "missing", f"{url} does not answer.", f"Start it, or set {role}.url.")
        for (role, url), there in zip(urls.items(), answers, strict=True)
    ]


async def _answers(url: str) -> bool:
    """Whatever it says of itself: what it can do is found out by the first request."""
    import httpx

    async with httpx.AsyncClient(timeout=_CONNECT_SECONDS) as client:
        try:
            await client.get(url)
        except httpx.HTTPError:
            return False
    return True


async def _cluster(
    recipe: Recipe, plan: InferencePlacementPlan | None, home: Path
) -> list[Finding]:
    try:
        variables = worker_environment(home)
    except RelaxError as error:
        return [Finding("ray", "missing", error.message, error.cure)]
    address = variables["RAY_ADDRESS"]
    store = recipe.staging.url or (Path(variables["RELAX_HOME"]) / "store").as_uri()
    asked = wanted(recipe, plan, store)
    cure = "Check RAY_ADDRESS and the network; `relax-infer up` starts what has ended."
    if not await _reachable(address):
        return [Finding("ray", "missing", f"Ray does not answer at {address}.", cure)]
    found = await _look(variables, asked)
    if isinstance(found, str):
        return [Finding("ray", "missing", f"Ray at {address} could not be asked: {found}", cure)]
    ok = Finding("ray", "ok", f"answers at {address}")
    return [ok, *judge(recipe, plan, asked, found)]


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
