"""The recipe's policies of more and fewer replicas."""

from collections.abc import Iterator

from relax_infer.config.placed import Section
from relax_infer.contracts.autoscale import AutoscalePolicy


class AutoscaleRule(AutoscalePolicy, Section):
    """How many replicas each of a role's models has, by its load. More come fast; fewer come
    slowly, one at a time, since an engine that is needed again has to be started anew."""

    models: tuple[str, ...] = ()
    """Only these models of the role, by model_id; empty: each of them."""

    def policy(self) -> AutoscalePolicy:
        return AutoscalePolicy.model_validate(self.model_dump(exclude={"models"}))


class Autoscale(Section):
    """Replicas that come and go by themselves, by the load of their role. Mode decoupled only."""

    rollout: AutoscaleRule | None = None
    """Of the policy's engines."""
    genrm: AutoscaleRule | None = None
    """Of each judge's engines."""
    teacher: AutoscaleRule | None = None
    """Of each Teacher's engines."""

    def rules(self) -> Iterator[tuple[str, AutoscaleRule]]:
        """Role and rule."""
        for role in ("rollout", "genrm", "teacher"):
            rule: AutoscaleRule | None = getattr(self, role)
            if rule is not None:
                yield role, rule
