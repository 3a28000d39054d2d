"""What of an engine's routes is for whom: for callers, behind the gate, under a fence token.

Whatever is not named here is hidden from callers, and needs a token on the management side.
"""

GATED = {
    "/generate": "/generate",
    "/v1/chat/completions": "/v1/chat/completions",
    "/chat/completions": "/v1/chat/completions",
    "/v1/completions": "/v1/completions",
}
"""POST paths behind the gate, and the engine's own name for each."""

METRICS = "/guard/metrics"
"""GET path of what the fence itself counts; the engine's own /metrics stays hidden."""

UNGATED = frozenset(
    {
        ("POST", "/close_session"),
        ("GET", "/v1/models"),
    }
)

ABORT = "/abort_request"
"""POST path at which a caller ends requests by their ids, with the gate open or closed."""

METADATA = {
    "/server_info": (
        "/server_info",
        (
            *("model_id", "model", "model_path", "served_model_name", "tp_size", "dp_size"),
            *("load_balance_method", "disaggregation_mode"),
        ),
    ),
    "/model_info": (
        "/model_info",
        ("model_path", "tokenizer_path", "is_generation", "model_type", "architectures"),
    ),
}
METADATA["/get_server_info"] = METADATA["/server_info"]
METADATA["/get_model_info"] = METADATA["/model_info"]
"""GET paths of which only the named fields leave the engine: never host, port or keys."""

_NO_TOKEN = frozenset(
    {
        # Reads.
        *("/health", "/health_generate", "/ready", "/ping", "/metrics", "/openapi.json"),
        *("/server_info", "/get_server_info", "/model_info", "/get_model_info", "/get_load"),
        *("/weights_checker", "/get_weights_by_name", "/list_external_corpora"),
        *("/get_hicache_l3_cache_layout", "/is_scaling_elastic_ep"),
        *("/get_transfer_engine_info", "/get_remote_instance_transfer_engine_info"),
        "/remote_instance_transfer_engine_info",
        # One request, and its end.
        *("/generate", "/encode", "/classify", "/invocations", "/vertex_generate"),
        *("/tokenize", "/detokenize", "/parse_function_call", "/separate_reasoning"),
        *("/", "/api/chat", "/api/generate", "/api/show", "/api/tags"),
        *("/open_session", "/close_session", ABORT),
        # Caches and instruments: the answers stay what they were.
        *("/flush_cache", "/freeze_gc", "/configure_logging", "/set_trace_level"),
        *("/start_profile", "/stop_profile"),
        *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
        "/dump_expert_distribution_record",
    }
)


def needs_token(path: str) -> bool:
    """Whether a path of the management side may change what is resident, what is answered, or
    whether anything is. One that is not known may."""
    return path not in _NO_TOKEN and (not path.startswith("/v1/") or ".." in path)
