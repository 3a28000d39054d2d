"""Environments in which the present rules are known to fail: what must be allowed, and why.

Each is left out of the other searches (``hazards``), and has a test that fails until the rule is
mended. Then its name leaves ``Config.allow`` and joins the others.
"""

from typing import NamedTuple

from tests.machines.explore import Check, check_one_holder
from tests.machines.model import Config

THREE = ("rollout", "genrm", "trainer")
TWO = ("rollout", "trainer")
_PERSON = frozenset({"resolve", "resolve_and_abandon"})


class Fault(NamedTuple):
    """A search that finds a counterexample."""

    config: Config
    check: Check | None = check_one_holder
    """None: every promise, and that there is always a good end."""


FAULTS_OF_THE_RULES: dict[str, Fault] = {
    # A recovery that was to rebuild stops within the grant (``ends_grant`` False). When it is
    # ABANDONED instead, nobody ends the token at its engine, whose actor was ended by the stop.
    "an-abandoned-rebuild-does-not-end-its-token": Fault(
        Config(
            roles=THREE,
            faults=3,
            allow=frozenset({"late_unended"}),
            only=frozenset({"answer", "late"}),
        )
    ),
    # GroupBook.usable leaves out what was given up: an offload or a stop does not reach it, and a
    # launch of the recovery that comes late is admitted under the token that did not end there.
    "a-replica-that-was-given-up-is-launched-late": Fault(
        Config(
            roles=THREE,
            replicas=2,
            faults=3,
            allow=frozenset({"late_launch_given_up"}),
            only=frozenset({"answer", "late"}),
        )
    ),
    # EngineLifecycle._take_word: a host that cannot be reached is believed to be gone, and its
    # engine has ended nothing; what was on its way there loads after the next grant was given.
    "a-host-that-was-given-up-comes-back": Fault(
        Config(
            roles=TWO,
            faults=3,
            allow=frozenset({"host_is_lost"}),
            only=frozenset({"request_lost", "late"}),
        )
    ),
    # GroupBook.follow: a recovery of a DEAD replica that is BLOCKED leaves it DEAD, so the group
    # is not in doubt and goes on. Under the next token the recovery is stale for ever, and a stop
    # waits for it for ever.
    "a-rebuild-of-a-dead-replica-is-blocked": Fault(
        Config(
            roles=TWO,
            faults=3,
            allow=frozenset({"stop_of_a_dead_replica_lost"}),
            only=frozenset({"server_dies", "answer", "request_lost"}),
        ),
        check=None,
    ),
    # TrainingRun._stop_role asks again after a person's word, and does not pass it on; the stop
    # waits for the recovery, and the recovery for a proof that cannot be had.
    "a-person's-word-does-not-reach-a-stop": Fault(
        Config(
            roles=TWO,
            faults=2,
            allow=frozenset({"stop_without_proof"}),
            only=frozenset({"answer"}),
            without=frozenset({"again"}),
        ),
        check=None,
    ),
    # GpuLease._reconcile_once: after a release whose answer came late the evidence is not read.
    "the-evidence-of-a-late-release-is-not-read": Fault(
        Config(
            roles=THREE,
            allow=frozenset({"memory_not_freed"}),
            only=frozenset({"answer", "timeout"}),
        )
    ),
}
