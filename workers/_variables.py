"""Variables of a worker's environment, read with an error that names them."""

import math
from collections.abc import Mapping

from relax_infer.contracts.failures import PermanentError


def port_of(given: Mapping[str, str], name: str) -> int | None:
    """
    Raises:
        PermanentError: it is no port.
    """
    text = given.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise PermanentError(
            f"{name} is {text!r}: it must be a port.", cure="A free one, or leave it out."
        )
    return int(text)


def seconds_of(given: Mapping[str, str], name: str, default: float) -> float:
    """
    Raises:
        PermanentError: it is no number of seconds.
    """
    text = given.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise PermanentError(
            f"{name} is {text!r}: it must be a number of seconds above 0.",
            cure=f"A number, or leave it out: {default:g}.",
        )
    return seconds
