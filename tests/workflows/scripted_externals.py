"""Engines that others started, in memory, for :mod:`tests.workflows.scripted_world`."""

import asyncio

from relax_infer.contracts.external import (
    ExternalAsk,
    ExternalLoss,
    ExternalReport,
    ExternalWatch,
)


class ScriptedExternal:
    """One of them."""

    def __init__(self, version: int | None, *, loads: bool = True, answers: bool = True) -> None:
        self.version, self.loads, self.answers = version, loads, answers
        self.busy = 0
        """Requests of somebody else."""
        self.loaded: list[int] = []

    @property
    def digest(self) -> str:
        return f"d{self.version}"


class ScriptedExternals:
    """By address."""

    def __init__(self) -> None:
        self.there: dict[str, ScriptedExternal] = {}

    def check(self, ask: ExternalAsk) -> ExternalReport:
        engine = self.there.get(ask.url)
        if engine is None or not engine.answers:
            return ExternalReport(url=ask.url, answers=False, error="nobody answers")
        wrong = ask.digest is not None and engine.digest != ask.digest
        if wrong and ask.weights is not None and engine.loads:
            engine.version = ask.weights.version
            engine.loaded.append(ask.weights.version)
        right = engine.digest == ask.digest
        return ExternalReport(
            url=ask.url,
            answers=True,
            right=right,
            weight_version=engine.version,
            weights_digest=engine.digest,
            error=None if right or ask.digest is None else f"it holds {engine.digest}",
        )

    async def watch(self, asked: ExternalWatch) -> ExternalLoss:
        while True:
            lost = {url: why for url in asked.versions if (why := self._lost(url, asked))}
            if lost:
                return ExternalLoss(lost=lost)
            await asyncio.sleep(0.05)

    def _lost(self, url: str, asked: ExternalWatch) -> str | None:
        engine = self.there[url]
        if not engine.answers:
            return "nobody answers"
        if asked.compares and engine.version != asked.versions[url]:
            return f"somebody else loaded version {engine.version}"
        return None
