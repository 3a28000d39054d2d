"""Fenced SGLang engines: launch, drain, release with proof, weights, routing.

Importing this package is cheap: what needs Ray or aiohttp is loaded when it is first named.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_infer.engines.actor import ReplicaDescription
    from relax_infer.engines.digest import expected_digest
    from relax_infer.engines.evidence import check_evidence, read_evidence, write_evidence
    from relax_infer.engines.group import EngineGroup
    from relax_infer.engines.guard import EngineGuard
    from relax_infer.engines.node import NodeReport
    from relax_infer.engines.release import (
        EngineProcesses,
        InferenceCleanupError,
        InferenceRecoveryRequired,
        ReleaseProof,
        prove_release,
    )
    from relax_infer.engines.request_log import read_request_log
    from relax_infer.engines.router import RouterAdapter, router_command
    from relax_infer.engines.sglang_engine import SGLangEngine
    from relax_infer.engines.static import InferenceEngineSpec

_HOME = {
    "InferenceCleanupError": "release",
    "InferenceEngineSpec": "static",
    "InferenceRecoveryRequired": "release",
    "EngineGroup": "group",
    "EngineGuard": "guard",
    "EngineProcesses": "release",
    "NodeReport": "node",
    "ReleaseProof": "release",
    "ReplicaDescription": "actor",
    "RouterAdapter": "router",
    "SGLangEngine": "sglang_engine",
    "check_evidence": "evidence",
    "expected_digest": "digest",
    "prove_release": "release",
    "read_evidence": "evidence",
    "read_request_log": "request_log",
    "router_command": "router",
    "write_evidence": "evidence",
}

__all__ = [
    "EngineGroup",
    "EngineGuard",
    "EngineProcesses",
    "InferenceCleanupError",
    "InferenceEngineSpec",
    "InferenceRecoveryRequired",
    "NodeReport",
    "ReleaseProof",
    "ReplicaDescription",
    "RouterAdapter",
    "SGLangEngine",
    "check_evidence",
    "expected_digest",
    "prove_release",
    "read_evidence",
    "read_request_log",
    "router_command",
    "write_evidence",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
