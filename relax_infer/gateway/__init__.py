"""The HTTP front of the roles, and the admission gate of the engines behind it.

Names are imported on first use: the gate needs nothing, the app needs an HTTP client.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_infer.gateway.app import create_gateway_app
    from relax_infer.gateway.control import create_control_app
    from relax_infer.gateway.forwarder import Forwarder
    from relax_infer.gateway.gate import AdmissionClosed, AdmissionGate
    from relax_infer.gateway.handler import InferenceGatewayHandler
    from relax_infer.gateway.intake import RegistryIntake, RegistryRefused

_WHERE = {
    "AdmissionClosed": "gate",
    "AdmissionGate": "gate",
    "Forwarder": "forwarder",
    "InferenceGatewayHandler": "handler",
    "RegistryIntake": "intake",
    "RegistryRefused": "intake",
    "create_control_app": "control",
    "create_gateway_app": "app",
}

__all__ = [
    "AdmissionClosed",
    "AdmissionGate",
    "Forwarder",
    "InferenceGatewayHandler",
    "RegistryIntake",
    "RegistryRefused",
    "create_control_app",
    "create_gateway_app",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
