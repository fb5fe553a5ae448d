"""Single paths: which are open to anyone, which change nothing, which a stopping server answers."""

PUBLIC = frozenset({"/livez", "/readyz", "/healthz", "/api/v1/healthz", "/openapi.json"})
"""Answered without a key: whether the server is there, and what it can be asked."""

METRICS = "/metrics"

ARRAYS = frozenset({"/api/v1/forward_backward", "/api/v1/forward"})
"""Calls with large bodies, which they read by themselves; those of others are JSON of moderate size."""

UNCHANGING = frozenset(
    {
        "/api/v1/client/config",
        "/api/v1/client/dynamic_config",
        "/api/v1/auth/token",
        "/api/v1/retrieve_future",
        "/api/v1/get_info",
        "/api/v1/weights_info",
        "/api/v1/session_heartbeat",
        "/api/v1/sessions/search",
        "/api/v1/telemetry",
        "/api/v1/asample",
        "/v1/completions",
        "/v1/chat/completions",
    }
)
"""Calls other than GET that change nothing which the audit log is about."""

ANSWERED_WHILE_STOPPING = frozenset(
    {
        "/api/v1/client/config",
        "/api/v1/client/dynamic_config",
        "/api/v1/retrieve_future",
        "/api/v1/cancel_future",
        "/api/v1/get_info",
        "/api/v1/weights_info",
        "/api/v1/session_heartbeat",
        "/api/v1/sessions/search",
        "/api/v1/telemetry",
    }
)
"""Calls other than GET that begin nothing; clients fetch results with them until the server is gone."""
