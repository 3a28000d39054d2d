"""Every route of the installed SGLang server, read from its source: an import takes half a minute.

The real walk in ``test_real_engine.py`` holds this list against what a running server names.
"""

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple

CHANGING_PATHS = frozenset(
    {
        *("/release_memory_occupation", "/resume_memory_occupation"),
        *("/pause_generation", "/continue_generation", "/slow_down"),
        *("/update_weights_from_disk", "/update_weights_from_tensor"),
        *("/update_weights_from_distributed", "/update_weights_from_ipc"),
        *("/begin_weight_update", "/end_weight_update", "/update_weight_version"),
        *("/init_weights_update_group", "/destroy_weights_update_group"),
        *("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
        *("/register_transfer_engine_info", "/set_internal_state", "/pd_role_switch"),
        *("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter"),
        *("/hicache/storage-backend", "/hicache/storage-backend/clear"),
        *("/add_external_corpus", "/remove_external_corpus", "/scale_elastic_ep"),
        "/dumper/{method}",
    }
)
"""Paths that change what is resident, what is answered, or whether anything is."""

_VERBS = {"get", "head", "post", "put", "patch", "delete", "options", "trace"}
_ADDERS = {"api_route", "route", "add_api_route", "add_route", "websocket", "websocket_route"}


class Listed(NamedTuple):
    path: str
    methods: tuple[str, ...]
    """Empty for a websocket."""


def listed_routes() -> list[Listed]:
    """Of every file of ``sglang.srt`` that puts a route on an app or a router."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0]) / "srt" / "entrypoints"
    found: dict[str, set[str]] = {}
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                _add(node, node.func.attr, found)
    return [Listed(path, tuple(sorted(methods))) for path, methods in sorted(found.items())]


def _add(call: ast.Call, name: str, found: dict[str, set[str]]) -> None:
    if name not in _VERBS | _ADDERS or not call.args:
        return
    path = call.args[0]
    if isinstance(path, ast.Call) and len(path.args) == 2:  # os.environ.get(name, default)
        path = path.args[1]
    if not (isinstance(path, ast.Constant) and isinstance(path.value, str)):
        return
    if not path.value.startswith("/"):
        return
    methods = found.setdefault(path.value.replace(":path}", "}"), set())
    if name in _VERBS:
        methods.add(name.upper())
    for keyword in call.keywords:
        if keyword.arg == "methods" and isinstance(keyword.value, ast.List):
            for item in keyword.value.elts:
                assert isinstance(item, ast.Constant)
                methods.add(str(item.value))
