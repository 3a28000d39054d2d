"""Whether a workflow that has begun moves to new code; told by workers that have a build alone.

The server refuses it from others, so the variable by which a worker has a build decides. It is read
once, when this module is imported, never while a workflow runs.
"""

import os

from temporalio.common import VersioningBehavior

_VERSIONED = bool(os.environ.get("RELAX_BUILD_ID"))
_NOT_SAID = VersioningBehavior.UNSPECIFIED

PINNED = VersioningBehavior.PINNED if _VERSIONED else _NOT_SAID
"""Ends on the build that it began with. For what ends soon."""
AUTO_UPGRADE = VersioningBehavior.AUTO_UPGRADE if _VERSIONED else _NOT_SAID
"""Goes on with the newest build: its earlier histories must replay there (tests/histories)."""
