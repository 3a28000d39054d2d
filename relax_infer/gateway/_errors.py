"""What a caller is told when its request cannot be answered: ``{"detail": ...}``."""

from relax_infer.discovery import InferenceRoutingError

RETRY_SOON = (b"retry-after", b"1")
HANG_UP = (b"connection", b"close")


class GatewayError(Exception):
    """An HTTP error status with its detail and headers."""

    def __init__(
        self, status: int, detail: object, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self.status, self.detail, self.headers = status, detail, headers
        super().__init__(f"{status} {detail}")


def routing(error: InferenceRoutingError) -> GatewayError:
    """400 is the caller's fault; 503 may be tried again."""
    again = (RETRY_SOON,) if error.status_code == 503 else ()
    return GatewayError(error.status_code, error.message, again)


def ending() -> GatewayError:
    """For a request that outlives the gateway. Its backend may have been asked, so nothing is said
    of trying again."""
    return GatewayError(503, "The gateway is shutting down", (HANG_UP,))
