"""Numbers of things in messages: one node, two nodes."""


def counted(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``; of a noun whose plural has an s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def are(number: int) -> str:
    """The verb behind it."""
    return "is" if number == 1 else "are"
