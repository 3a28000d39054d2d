"""Secrets come from the environment or from files that nobody else may read; never from recipes or
command lines, which end up in histories and process lists."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from relax_infer.contracts.failures import PermanentError
from relax_infer.telemetry import remember_secret


def secret(name: str, variables: Mapping[str, str] | None = None) -> str | None:
    """The variable ``name``, or what the file holds that ``name_FILE`` names; None: neither is set.
    It is hidden in logs from now on.

    Raises:
        PermanentError: the file cannot be read, is empty, or others may read it.
    """
    given = os.environ if variables is None else variables
    value = given.get(name, "")
    if not value and (path := given.get(f"{name}_FILE", "")):
        value = read_private(Path(path), f"{name}_FILE").strip()
        if not value:
            raise PermanentError(f"{path} ({name}_FILE) is empty.", cure="Put the secret into it.")
    if value:
        remember_secret(value)
    return value or None


def read_private(path: Path, why: str) -> str:
    """Text of a file that only its owner may read.

    Raises:
        PermanentError: it cannot be read, or group or others may read it.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise PermanentError(
            f"{path} ({why}) cannot be read: {reason}.", cure=f"Correct {why}, or leave it out."
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermanentError(
            f"{path} ({why}) may be read by others: its mode is {stat.S_IMODE(mode):04o}.",
            cure=f"chmod 600 {path}",
        )
    return text
