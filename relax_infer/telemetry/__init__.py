"""What this program tells of itself: logs, metrics, traces; and never a secret in any of them.

Nothing here is on a request's way unless it was asked for.
"""

from relax_infer.telemetry.logs import as_text, configure_logs
from relax_infer.telemetry.places import configure_actor, log_folder
from relax_infer.telemetry.redaction import HIDDEN, redacted, remember_secret
from relax_infer.telemetry.subjects import (
    FIELDS,
    about,
    about_process,
    subject,
    subject_of_workflow,
)

__all__ = [
    "FIELDS",
    "HIDDEN",
    "about",
    "about_process",
    "as_text",
    "configure_actor",
    "configure_logs",
    "log_folder",
    "redacted",
    "remember_secret",
    "subject",
    "subject_of_workflow",
]
