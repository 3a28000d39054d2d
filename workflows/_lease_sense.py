"""Requests of people to the lease that make no sense, though no rule of the book is against them.

Asked before anything is carried out, and not again when a history is replayed: so a rule may be
added here while runs are open.
"""

from relax_infer.contracts.lease import LeaseRequest
from relax_infer.machines import LeaseState
from workflows._lease_book import LeaseBook, LeaseRefused


def refuse_nonsense(request: LeaseRequest, book: LeaseBook) -> None:
    """Raises :class:`LeaseRefused`, with what would make sense."""
    if not request.operation_id.strip():
        raise LeaseRefused(
            f"{request.method} needs an operation_id: any text that you give to no other operation;"
            " the same again gets the same answer"
        )
    match request.method:
        case "acquire" if request.purpose == "train" and request.role != "trainer":
            raise LeaseRefused(
                f"{request.role} does not train: acquire it for startup, weight_sync or eval"
            )
        case "activate" if request.role == "trainer":
            raise LeaseRefused(
                "the trainer has no part in a pending batch: acquire it to train once its batch is"
                " committed"
            )
        case "resolve":
            _refuse_resolution(request, book)
        case _:
            pass


def _refuse_resolution(request: LeaseRequest, book: LeaseBook) -> None:
    role, blocked = request.role, book.blocked
    if role is not None and role in book.roles and book.roles[role].state is not LeaseState.BLOCKED:
        waits = ", ".join(blocked) or "nobody"
        raise LeaseRefused(
            f"{role} is {book.roles[role].state}, not BLOCKED: there is nothing to resolve of it;"
            f" BLOCKED is {waits}"
        )
    batch = book.batch
    if not request.abandon:
        return
    if batch is None:
        raise LeaseRefused("there is no batch to abandon: resolve without abandon")
    if request.batch not in (None, batch.batch):
        raise LeaseRefused(
            f"batch {request.batch} is not the current batch ({batch.batch}): it cannot be"
            " abandoned"
        )
