"""Added replicas that their group does not operate on, without Temporal: in the making, leaving, or
left half cleaned."""

from typing import Any

from relax_infer.contracts.engines import AddedReplica
from relax_infer.contracts.scale import OutsiderRecord


class Outsiders:
    """By number. A number is given once, so nothing of a removed replica is taken for another."""

    def __init__(self, first: int, carried: dict[str, Any] | None = None) -> None:
        """``first``: the number of the first replica that is added."""
        document: dict[str, Any] = carried or {}
        records = [OutsiderRecord.model_validate(each) for each in document.get("records", [])]
        self._records = {record.replica: record for record in records}
        self._next = int(document.get("next", first))
        self.urls: dict[int, str] = {int(k): url for k, url in document.get("urls", [])}
        """The last address of each added replica, also while it does not answer; none while it is
        being rebuilt."""

    def __contains__(self, replica: int) -> bool:
        return replica in self._records

    def __bool__(self) -> bool:
        return bool(self._records)

    def __getitem__(self, replica: int) -> OutsiderRecord:
        return self._records[replica]

    @property
    def all(self) -> tuple[OutsiderRecord, ...]:
        return tuple(self._records[k] for k in sorted(self._records))

    @property
    def leave(self) -> bool:
        """Whether a replica is on its way out."""
        return any(record.stage == "leaving" for record in self._records.values())

    def reserve(self, number: int, operation: str) -> tuple[int, ...]:
        """Numbers for replicas that are going to be made."""
        numbers = tuple(range(self._next, self._next + number))
        self._next += number
        for k in numbers:
            self.put(OutsiderRecord(replica=k, stage="making", operation=operation))
        return numbers

    def place(self, placement: AddedReplica) -> None:
        """It has GPUs: from now on something of it may run."""
        known = self._records[placement.replica]
        self.put(known.model_copy(update={"placement": placement}))

    def put(self, record: OutsiderRecord) -> None:
        self._records[record.replica] = record

    def forget(self, replica: int) -> None:
        """Nothing of it is left; or the group operates on it."""
        self._records.pop(replica, None)

    def abandon(self, operation: str) -> None:
        """Nobody is at work any more on what the operation had in hand."""
        for record in self.all:
            if record.operation == operation and record.stage != "left":
                why = f"scale operation {operation} was ended before it was done"
                # Without GPUs nothing ran; a placement group may be there all the same.
                stopped = record.stopped or record.placement is None
                self.put(
                    record.model_copy(update={"stage": "left", "why": why, "stopped": stopped})
                )

    def carry(self) -> dict[str, Any]:
        """For continue-as-new."""
        return {
            "records": [record.model_dump(mode="json") for record in self.all],
            "next": self._next,
            "urls": [[k, url] for k, url in self.urls.items()],
        }
