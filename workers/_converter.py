"""JSON in and out of workflows; what a person typed wrongly is refused in words."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticPayloadConverter, pydantic_data_converter
from temporalio.exceptions import ApplicationError

from relax_infer.contracts.faults import explain
from relax_infer.security.codec import sealed


class ExplainingConverter(PydanticPayloadConverter):
    """Pydantic's converter whose refusals name field, value and what is allowed."""

    def from_payloads(
        self, payloads: Sequence[Payload], type_hints: list[type] | None = None
    ) -> list[Any]:
        """
        Raises:
            ApplicationError: a value is not of its type; it fails the workflow, the update or the
                activity at once.
        """
        try:
            return super().from_payloads(payloads, type_hints)
        except ValidationError as error:
            hints: list[type] | list[None] = type_hints or [None]
            model = hints[0] if len(hints) == 1 else None
            name = getattr(model, "__name__", "") or "input"
            raise ApplicationError(
                f"{name}: {explain(error, model)}", type="Permanent", non_retryable=True
            ) from None


def data_converter() -> Any:
    """What every client of a worker process uses; sealed where RELAX_PAYLOAD_KEYS says so."""
    plain = replace(pydantic_data_converter, payload_converter_class=ExplainingConverter)
    return sealed(plain)
