"""The Megatron-Core policy trainer: losses, weights to and from Hugging Face, checkpoints, ledger.

Importing this package is cheap: torch, Megatron-Core and Ray are loaded when they are needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_infer.training.group import TrainerGroup
    from relax_infer.training.hf_folder import weights_digest
    from relax_infer.training.ledger import Ledger, LedgerEntry, read_ledger
    from relax_infer.training.policy import PolicyTrainer

_HOME = {
    "Ledger": "ledger",
    "LedgerEntry": "ledger",
    "PolicyTrainer": "policy",
    "TrainerGroup": "group",
    "read_ledger": "ledger",
    "weights_digest": "hf_folder",
}

__all__ = [
    "Ledger",
    "LedgerEntry",
    "PolicyTrainer",
    "TrainerGroup",
    "read_ledger",
    "weights_digest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
