"""Evidence of a release: written where an activity can read it, and judged."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import fsspec

from relax_infer.contracts.engines import (
    RESIDENT_TAGS,
    EngineGroupSpec,
    NodeMemory,
    OffloadCheck,
    OffloadConfirmation,
    ReleaseEvidence,
)
from relax_infer.contracts.failures import PermanentError, TransientError, UnconfirmedError
from relax_infer.contracts.fence import FenceToken
from relax_infer.contracts.refs import StagedRef
from relax_infer.engines.memory import NodeUse

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


def write_evidence(
    spec: EngineGroupSpec, operation_id: str, evidence: Sequence[ReleaseEvidence]
) -> StagedRef:
    """Stage evidence as JSON at
    ``<store>/<run>/engines/evidence/<operation id>.<first 8 digits of its SHA-256>.json``.

    The digest in the name keeps a file what it was when the same operation has new evidence.
    Raises :class:`TransientError` if the store cannot be written.
    """
    rows = [each.model_dump(mode="json") for each in evidence]
    content = json.dumps(rows, indent=1, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()
    name = f"{_NOT_IN_NAMES.sub('-', operation_id)}.{digest[:8]}.json"
    uri = f"{spec.store.rstrip('/')}/{spec.run}/engines/evidence/{name}"
    try:
        files, path = _file(uri)
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        partial = f"{path}.partial"
        files.pipe_file(partial, content)
        files.mv(partial, path)
    except OSError as error:
        raise TransientError(f"Cannot write release evidence to {uri}: {error}.") from error
    return StagedRef(uri=uri, sha256=digest, rows=len(rows))


def read_evidence(ref: StagedRef) -> list[ReleaseEvidence]:
    """Raises :class:`TransientError` if the file cannot be read, :class:`PermanentError` if it
    is not the one that was staged."""
    try:
        files, path = _file(ref.uri)
        content: bytes = files.cat_file(path)
    except FileNotFoundError as error:
        raise PermanentError(f"Release evidence {ref.uri} is gone.") from error
    except OSError as error:
        raise TransientError(f"Cannot read release evidence {ref.uri}: {error}.") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != ref.sha256:
        raise PermanentError(
            f"Release evidence {ref.uri} was changed: its SHA-256 is {digest}, {ref.sha256} was"
            " staged."
        )
    return [ReleaseEvidence.model_validate(row) for row in json.loads(content)]


def check_evidence(check: OffloadCheck, evidence: Sequence[ReleaseEvidence]) -> OffloadConfirmation:
    """Does the evidence prove that every holder let go under this token? Pure.

    Raises:
        UnconfirmedError: it does not; the text names every holder that is off, and how.
    """
    seen = Counter(each.holder for each in evidence)
    wrong = [f"{holder} gave none" for holder in check.holders if not seen[holder]]
    wrong += [f"{holder} gave {count} times" for holder, count in seen.items() if count > 1]
    wrong += [f"{holder} was not asked for" for holder in seen if holder not in check.holders]
    for each in evidence:
        wrong += [f"{each.holder} {why}" for why in _doubts(check, each)]
    if wrong:
        raise UnconfirmedError(
            f"The release of {check.role} under fence token {check.fence} is not proved:"
            f" {'; '.join(wrong)}.",
            cure="The GPUs stay with it until a reconcile or a person settles it.",
        )
    return OffloadConfirmation(
        role=check.role,
        holders=len(check.holders),
        proof=tuple(sorted({each.proof for each in evidence})),
    )


def _doubts(check: OffloadCheck, evidence: ReleaseEvidence) -> list[str]:
    doubts: list[str] = []
    if evidence.fence != check.fence:
        doubts.append(f"answered for fence token {evidence.fence}")
    if sorted(evidence.tags) != sorted(check.tags):
        doubts.append(f"released {list(evidence.tags)}, asked for {list(check.tags)}")
    return doubts + memory_doubts(evidence)


def memory_doubts(evidence: ReleaseEvidence) -> list[str]:
    """Why the memory that is still in use contradicts the release; empty where it does not."""
    doubts: list[str] = []
    after, allowed = evidence.memory_after, evidence.residual_allowed
    if evidence.proof == "memory" and (after is None or allowed is None):
        doubts.append("claims freed memory without saying how much is left and allowed")
    if allowed is not None and after is None:
        doubts.append("did not say how much memory is left")
    if after is not None and allowed is not None and after > allowed:
        doubts.append(f"still has {after} bytes in use, {allowed} allowed")
    doubts += [
        f"still has {part.after} bytes in use on its node {part.node}, {part.allowed} allowed"
        for part in evidence.nodes
        if part.after > part.allowed
    ]
    return doubts


def release_evidence(
    holder: str,
    token: FenceToken,
    *,
    at: float,
    gone: bool,
    uses: Sequence[NodeUse] = (),
    beyond: int = 0,
) -> ReleaseEvidence:
    """Evidence of a replica that let go of everything.

    Args:
        uses: every node's own measure, from before and after; byte counts are None without devices.
        beyond: bytes that may remain on each device, beside what was in use before the launch.

    Raises:
        UnconfirmedError: of a replica that lives, some nodes can tell and others cannot.
    """
    parts = tuple(part for use in uses if (part := _part(use, beyond)) is not None)
    if not gone and 0 < len(parts) < len(uses):
        silent = sorted({use.node for use in uses} - {part.node for part in parts})
        raise UnconfirmedError(f"{holder} cannot tell what is in use on its nodes {silent}.")
    before = [part.before for part in parts if part.before is not None]
    proof = "process_gone" if gone else "memory" if parts else "simulated"
    return ReleaseEvidence(
        holder=holder,
        proof=proof,
        tags=RESIDENT_TAGS,
        fence=token,
        at=at,
        memory_before=sum(before) if before else None,
        memory_after=sum(part.after for part in parts) if parts else None,
        residual_allowed=sum(part.allowed for part in parts) if parts else None,
        nodes=parts if len(uses) > 1 else (),
    )


def _part(use: NodeUse, beyond: int) -> NodeMemory | None:
    if use.at_launch is None or use.after is None:
        return None
    return NodeMemory(
        node=use.node,
        before=use.in_use,
        after=use.after,
        allowed=use.at_launch + beyond * use.devices,
    )


def _file(uri: str) -> tuple[Any, str]:
    files, path = fsspec.url_to_fs(uri)  # pyright: ignore[reportUnknownMemberType]
    return files, str(path)
