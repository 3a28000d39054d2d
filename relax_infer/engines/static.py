"""Engines whose weights never change: GenRM and Teacher.

What would change them is refused before anything is sent, and a configuration under which they
could not keep their own checkpoint is refused before anything is launched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

WEIGHT_OPERATIONS = frozenset(
    {
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "init_weights_update_group",
        "destroy_weights_update_group",
        "init_weights_send_group_for_remote_instance",
        "send_weights_to_remote_instance",
        "load_lora_adapter",
        "load_lora_adapter_from_tensors",
        "update_lora_from_distributed",
        "unload_lora_adapter",
        "post_process_weights",
        "register_dcs",
        "run_scale_weight_sync_precheck",
    }
)
"""Operations that bring weights to an engine or take them from it."""

Value = str | int | float | bool | None

_NO_BACKUP = "without the CPU weight backup a release would lose the weights for good"
_NO_SAVER = "without the memory saver a release would free nothing"


@dataclass(frozen=True)
class InferenceEngineSpec:
    """What a static role's engines may be asked."""

    role: Literal["genrm", "teacher"]
    weight_source: Literal["STATIC"] = "STATIC"
    strict_drain: bool = True
    """Nothing is released before the engine itself says that it is idle."""

    def require_operation(self, name: str) -> None:
        """Raises RuntimeError for what would change the weights of a static engine."""
        if name in WEIGHT_OPERATIONS:
            raise RuntimeError(
                f"{self.role} engines are STATIC: they keep the checkpoint that they were started"
                f" with, and {name} is not for them."
            )


def static_faults(server_args: Mapping[str, Value]) -> dict[str, str]:
    """SGLang flags (dashes or underscores) that a static engine must not have, and why."""
    faults: dict[str, str] = {}
    for name, value in server_args.items():
        flag = name.replace("_", "-")
        if flag == "load-format" and value == "dummy":
            faults[name] = "a static engine needs its own checkpoint, dummy has none"
        elif _no_backup(name, value):
            faults[name] = _NO_BACKUP
        elif "lora" in flag and value not in (None, False):
            faults[name] = "a static engine takes no LoRA adapters"
    return faults


def backup_faults(server_args: Mapping[str, Value]) -> dict[str, str]:
    """SGLang flags (dashes or underscores) that no engine which sleeps by SGLang's release may
    have, whatever its role, and why."""
    return {
        name: _NO_BACKUP if _no_backup(name, value) else _NO_SAVER
        for name, value in server_args.items()
        if _no_backup(name, value) or _left_out(name, value, "enable-memory-saver")
    }


def _no_backup(name: str, value: Value) -> bool:
    return _left_out(name, value, "enable-weights-cpu-backup")


def _left_out(name: str, value: Value, flag: str) -> bool:
    """None leaves the flag out, as False does."""
    return name.replace("_", "-") == flag and value in (False, None)


def validate_static_server_args(server_args: Mapping[str, Value]) -> None:
    """Raises ValueError that names every flag of :func:`static_faults` and why it cannot be."""
    if faults := static_faults(server_args):
        told = "; ".join(f"{name}: {why}" for name, why in faults.items())
        raise ValueError(f"server_args of a static engine: {told}.")
