"""Which code this worker is, for Temporal's worker versioning. Off unless asked for.

With RELAX_DEPLOYMENT and RELAX_BUILD_ID a step that has begun is finished by workers of the build
that it began with; each workflow's own behaviour is in its ``workflow.defn``.
"""

from collections.abc import Mapping

from temporalio.common import WorkerDeploymentVersion
from temporalio.worker import WorkerDeploymentConfig

from relax_infer.contracts.failures import PermanentError


def deployment_of(variables: Mapping[str, str]) -> WorkerDeploymentConfig | None:
    """None: nobody asked, and any worker takes any task.

    Raises:
        PermanentError: one of the two is missing, or a name has a dot, by which Temporal tells
            deployment and build apart.
    """
    name, build = variables.get("RELAX_DEPLOYMENT", ""), variables.get("RELAX_BUILD_ID", "")
    if not name and not build:
        return None
    if not name or not build:
        missing = "RELAX_BUILD_ID" if name else "RELAX_DEPLOYMENT"
        raise PermanentError(
            f"{missing} is not set: a version has a deployment and a build.",
            cure="Set RELAX_DEPLOYMENT and RELAX_BUILD_ID, or neither.",
        )
    if "." in name:
        raise PermanentError(
            f"RELAX_DEPLOYMENT is {name!r}: it must not have a dot.", cure="For instance relax."
        )
    version = WorkerDeploymentVersion(deployment_name=name, build_id=build)
    return WorkerDeploymentConfig(version=version, use_worker_versioning=True)
