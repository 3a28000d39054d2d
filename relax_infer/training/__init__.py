"""The Megatron-Core policy trainer: losses, weights to and from Hugging Face, checkpoints, ledger.

Importing this package is cheap: torch, Megatron-Core and Ray are loaded when they are needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_infer.training.group import TrainerGroup
    from relax_infer.training.heritage import Heritage, find_heritage, take_over
    from relax_infer.training.hf_folder import weights_digest
    from relax_infer.training.ledger import Ledger, LedgerEntry, read_ledger
    from relax_infer.training.policy import PolicyTrainer

_HOME = {
    "Heritage": "heritage",
    "Ledger": "ledger",
    "LedgerEntry": "ledger",
    "PolicyTrainer": "policy",
    "TrainerGroup": "group",
    "find_heritage": "heritage",
    "read_ledger": "ledger",
    "take_over": "heritage",
    "weights_digest": "hf_folder",
}

__all__ = [
    "Heritage",
    "Ledger",
    "LedgerEntry",
    "PolicyTrainer",
    "TrainerGroup",
    "find_heritage",
    "read_ledger",
    "take_over",
    "weights_digest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
