"""The gateway of a run: ``python -m workers.gateway --run RUN --port P --control-socket S``.

Registries are pushed to the control socket. Started empty, it asks the run's role workflows for
theirs (query ``registry``), by the standard Temporal environment configuration.
"""

import argparse
import asyncio
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvloop
from temporalio.client import Client, WorkflowUpdateFailedError, WorkflowUpdateStage
from temporalio.envconfig import ClientConfig

from relax_infer.contracts.lease import RoleResult
from relax_infer.contracts.scale import ScaleRequest, ScaleStatus
from relax_infer.discovery import Role
from relax_infer.gateway._asgi import App
from relax_infer.gateway.judge import MAX_NEW_TOKENS
from relax_infer.gateway.operator import ScaleRefused, with_operator_routes
from relax_infer.gateway.serve import (
    GatewayOptions,
    named_folders,
    named_objects,
    serve_gateway,
)
from relax_infer.telemetry import configure_logs
from relax_infer.telemetry.traces import configure_traces, end_traces
from workers._converter import data_converter

OPERATOR_TOKEN = "RELAX_OPERATOR_TOKEN"
_QUERY_TIMEOUT = timedelta(seconds=5)
_UPDATE_TIMEOUT = timedelta(seconds=60)


class RoleWorkflows:
    """Asks ``<run>.<role>`` for its registry; connects when first asked."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._client: Client | None = None
        self._connecting = asyncio.Lock()

    async def pull(self, role: Role) -> Mapping[str, Any] | None:
        """The role's term and document; raises whatever Temporal raises."""
        client = await self._connected()
        handle = client.get_workflow_handle(f"{self._run}.{role}")
        return await handle.query("registry", rpc_timeout=_QUERY_TIMEOUT)

    async def scale(self, role: Role, request: ScaleRequest) -> ScaleStatus:
        """Have the role take it in; raises ScaleRefused, or whatever Temporal raises."""
        client = await self._connected()
        handle = client.get_workflow_handle(f"{self._run}.{role}")
        body = request.model_dump(mode="json")
        try:
            told = await handle.execute_update("scale", body, rpc_timeout=_UPDATE_TIMEOUT)
        except WorkflowUpdateFailedError as error:
            raise ScaleRefused(str(error.cause)) from error
        return ScaleStatus.model_validate(told)

    async def scaling(self, role: Role, operation_id: str) -> ScaleStatus | None:
        """How an operation stands, if the role remembers it."""
        client = await self._connected()
        handle = client.get_workflow_handle(f"{self._run}.{role}")
        every: list[Any] = await handle.query("scaling", rpc_timeout=_QUERY_TIMEOUT)
        known = [each for each in every if each["operation_id"] == operation_id]
        return ScaleStatus.model_validate(known[0]) if known else None

    async def recover(self, role: Role, request_id: str, seconds: float) -> RoleResult | None:
        """Have the role try again what was given up; None: it is still at it. The same id joins."""
        client = await self._connected()
        handle = client.get_workflow_handle(f"{self._run}.{role}")
        try:
            update = await handle.start_update(
                "recover",
                id=f"recover-{request_id}",
                wait_for_stage=WorkflowUpdateStage.ACCEPTED,
                rpc_timeout=_UPDATE_TIMEOUT,
            )
            told = await asyncio.wait_for(update.result(), seconds)
        except TimeoutError:
            return None
        except WorkflowUpdateFailedError as error:
            raise ScaleRefused(str(error.cause)) from error
        return RoleResult.model_validate(told)

    def operated(self, app: App) -> App:
        """With the operator's routes, where the environment names a token."""
        token = os.environ.get(OPERATOR_TOKEN, "")
        if not token:
            return app
        return with_operator_routes(
            app, token=token, ask=self.scale, look=self.scaling, recover=self.recover
        )

    async def _connected(self) -> Client:
        async with self._connecting:
            if self._client is None:
                config = ClientConfig.load_client_connect_config()
                config.setdefault("target_host", "localhost:7233")
                self._client = await Client.connect(**config, data_converter=data_converter())
            return self._client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="run id")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--control-socket", type=Path, required=True)
    parser.add_argument("--request-timeout", type=float, default=1800.0, help="seconds")
    parser.add_argument("--role", action="append", choices=list(Role), help="serve only these")
    parser.add_argument(
        "--rollout-router", help="router of engines that are not the run's own; chat goes there"
    )
    parser.add_argument(
        "--genrm-tokenizer",
        action="append",
        default=[],
        metavar="MODEL=FOLDER",
        help="for messages; without it the engine is asked where its tokenizer is",
    )
    parser.add_argument(
        "--genrm-template-kwargs",
        action="append",
        default=[],
        metavar="MODEL=JSON",
        help="given to that template besides the messages",
    )
    parser.add_argument(
        "--genrm-max-new-tokens",
        type=int,
        default=MAX_NEW_TOKENS,
        help="of messages that do not say",
    )
    arguments = parser.parse_args()
    configure_logs(run=arguments.run, role="gateway")
    configure_traces("relax-gateway")
    try:
        uvloop.run(_serve(arguments))
    finally:
        end_traces()


async def _serve(arguments: argparse.Namespace) -> None:
    roles = RoleWorkflows(arguments.run)
    await serve_gateway(
        host=arguments.host,
        port=arguments.port,
        control_socket=arguments.control_socket,
        pull=roles.pull,
        wrap=roles.operated,
        options=GatewayOptions(
            roles=tuple(Role(role) for role in arguments.role or Role),
            timeout=arguments.request_timeout,
            rollout_router=arguments.rollout_router,
            tokenizers=named_folders(arguments.genrm_tokenizer),
            template_kwargs=named_objects(arguments.genrm_template_kwargs),
            judge_tokens=arguments.genrm_max_new_tokens,
        ),
    )


if __name__ == "__main__":
    main()
