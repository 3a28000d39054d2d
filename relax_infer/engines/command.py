"""The command line and environment of one engine process."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from relax_infer.contracts.engines import EngineGroupSpec
from relax_infer.contracts.fence import FenceToken
from relax_infer.engines.digest import checkpoint_dtype
from relax_infer.engines.release import MARKER

Scalar = str | int | float | bool | None

CPU_SHIM = Path(__file__).parent / "cpu_shim"
"""Folder for the PYTHONPATH of every process that loads a model on a machine without CUDA."""

_CPU: dict[str, Scalar] = {
    "device": "cpu",
    "attention-backend": "torch_native",
    "disable-overlap-schedule": True,
    "mem-fraction-static": 0.1,
    "max-total-tokens": 8192,
    "max-running-requests": 32,
    "context-length": 1024,
    # Without it an idle server burns a core.
    "sleep-on-idle": True,
}


def server_settings(
    spec: EngineGroupSpec,
    *,
    host: str,
    port: int,
    dist_port: int,
    model_path: str,
    weight_version: int | None,
) -> dict[str, Scalar]:
    """SGLang's flags without dashes; what the spec sets wins over the defaults of the device."""
    settings: dict[str, Scalar] = {
        "model-path": model_path,
        "served-model-name": spec.model,
        "tp": spec.gpus_per_replica,
        "log-level": "info",
        "log-level-http": "warning",
    }
    if weight_version is not None:
        settings["weight-version"] = str(weight_version)
    if spec.device == "cpu":
        # "auto" would narrow float32 to float16.
        settings |= _CPU | {"dtype": checkpoint_dtype(Path(spec.model_path))}
    elif spec.offload == "memory_saver":
        # Weights keep a copy in host memory, or a resume would bring back garbage.
        settings |= {"enable-memory-saver": True, "enable-weights-cpu-backup": True}
    settings |= spec.server_args
    # The engine's actor decides these; whatever the spec says of them cannot be.
    return settings | {"host": host, "port": port, "nccl-port": dist_port}


def command_line(
    spec: EngineGroupSpec,
    settings: Mapping[str, Scalar],
    *,
    socket: Path,
    token: FenceToken,
    request_log: Path,
) -> list[str]:
    """Arguments of the fenced server: True is a bare flag, False and None leave a flag out."""
    command = [
        *(spec.python or sys.executable, "-m", "relax_infer.engines.server"),
        *("--fence-socket", str(socket), "--fence-token", str(token)),
        *("--request-log", str(request_log)),
    ]
    for name, value in settings.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command += [f"--{name}", str(value)]
    return command


def environment(
    spec: EngineGroupSpec,
    incarnation: str,
    gpus: tuple[int, ...],
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables of the engine's processes: the caller's own, changed where it matters."""
    variables = dict(os.environ if inherited is None else inherited)
    # Ray shows its actor one device of a fraction; an engine gets its own list.
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus)) if spec.device == "cuda" else ""
    variables |= {
        MARKER: incarnation,
        # Else setproctitle erases the marker from the very processes that hold the memory.
        "SPT_NOENV": "1",
        "HF_HUB_OFFLINE": "1",
        # Longer than callers keep idle connections: else one that is reused as it is being
        # closed fails a request, and a POST is not sent again.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.device == "cpu":
        variables["OMP_NUM_THREADS"] = variables.get("OMP_NUM_THREADS", "1")
        paths = [str(CPU_SHIM), *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
        variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return variables
