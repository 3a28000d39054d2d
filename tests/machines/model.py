"""The model: one pool, its lease, its engines, one step after another, and a hostile environment.

A :class:`State` is a value; ``hazards.events`` lists what may happen in it, ``moves.after_event``
says what then is. The rules are the project's own (``books``, ``host``, ``groups``, ``recoveries``,
``trainer``). What stands in ``moves`` and ``lease_moves`` is only what ``GpuLease``,
``InferenceRole``, ``TrainingStep`` and ``TrainingRun`` do between two rules.

The environment has a budget of faults. A step is repeated once; then the run is taken down.
``allow`` names what may happen only in searches about it: memory that an engine keeps although it
says that it sleeps, an acknowledgement that releases, and a lease that is ended by hand.
"""

from dataclasses import dataclass
from typing import NamedTuple

from relax_infer.machines import STEP, StepPhase
from tests.machines.books import Book, new_book
from tests.machines.groups import Work
from tests.machines.recoveries import course
from tests.machines.values import HOLDING, Call, Engine, Group, Token

Event = tuple[str, ...]
"""A name and, as text, the role and whatever else tells it from others."""


class Zombie(NamedTuple):
    """A request to one replica that is still on its way, or a duplicate of one that was heard."""

    kind: str
    token: Token
    replica: int
    ends: bool
    done: bool
    """The replica's actor remembers it: a duplicate gets the recorded outcome."""


class Role(NamedTuple):
    """One role: its engine group as the lifecycle sees it, its engines, and what is on its way."""

    group: Group = Group()
    engines: tuple[Engine, ...] = (Engine(),)
    work: Work | None = None
    """What has the group's turn."""
    own: Call | None = None
    """The activity that ``work`` itself waits for; others are of its recoveries."""
    inbox: tuple[tuple[str, Token | None, int], ...] = ()
    zombies: frozenset[Zombie] = frozenset()
    doubted: bool = False
    """The evidence of a release contradicted it."""
    lost: bool = False
    """The signal ``holder_lost`` is on its way to the lease."""

    @property
    def holding(self) -> bool:
        return any(engine.gpu in HOLDING for engine in self.engines)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Activities in flight."""
        mine = () if self.own is None else (self.own,)
        courses = [course(recovery).call for recovery in self.group.recoveries]
        return mine + tuple(c._replace(recovery=n) for n, c in enumerate(courses) if c is not None)

    @property
    def stuck(self) -> bool:
        """A recovery waits for proof or for a person."""
        return any(course(recovery).blocked for recovery in self.group.recoveries)


class Step(NamedTuple):
    """The one client of the lease, with the lease operation that it waits for."""

    mode: str = "run"
    """run, giving_up, person, down or ended."""
    pc: int = 0
    wait: str = ""
    """"": nothing; "answer": of ``role``; "known": until the lease knows where ``role`` stands;
    "doubt": until it knows of every role; "gone": for a lease that was ended by hand."""
    role: str = ""
    method: str = ""
    token: Token | None = None
    tries: int = 0
    error: str = ""
    held: str = ""
    """The role that the step has to let go of."""
    attempt: int = 1
    phase: StepPhase = STEP.initial
    granted: Token | None = None
    """With which the step asks the trainer to train."""
    leases: int = 0
    """That were lost when this attempt began."""


class Truth(NamedTuple):
    """What really happened to the batch of this attempt."""

    generated: bool = False
    scored: tuple[str, ...] = ()
    published: bool = False
    trained: bool = False


class Anew(NamedTuple):
    """Leases that were ended by hand, and the one that was begun after them."""

    number: int = 0
    """Of the leases that were begun anew."""
    gone: bool = False
    """The last one was ended too, and nobody has begun another; ``book`` is what it said last."""
    left: tuple[str, ...] = ()
    """Roles that the lost one left, until each is known to have let go."""
    finding: tuple[str, ...] = ()
    """Those of them that were asked to let go once more, and have not answered."""
    past: tuple[str, ...] = ()
    """Batches that the lost ones committed."""


class State(NamedTuple):
    """Everything."""

    book: Book
    roles: tuple[Role, ...]
    faults: int
    step: Step = Step()
    truth: Truth = Truth()
    held_back: tuple[tuple[str, ...], ...] = ()
    """Answers of probes that the lease has not heard yet: role, what, and the token asked about."""
    resolving: tuple[str, ...] = ()
    """The role that a person's word is being carried to, whether the batch is abandoned, and
    whether the person was told that the evidence contradicts a release."""
    anew: Anew = Anew()

    @property
    def committed(self) -> tuple[str, ...]:
        """Batches, under any lease of the run."""
        return (*self.anew.past, *self.book.committed)


@dataclass(frozen=True)
class Config:
    """What is modelled."""

    roles: tuple[str, ...] = ("rollout", "genrm", "trainer")
    replicas: int = 1
    faults: int = 2
    attempts: int = 2
    allow: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    """Kinds of fault to try; None: all."""
    without: frozenset[str] = frozenset()
    """Events that do not happen, such as those of a person."""

    @property
    def judges(self) -> tuple[str, ...]:
        return tuple(r for r in self.roles if r in ("genrm", "teacher"))

    @property
    def plan(self) -> tuple[tuple[str, str], ...]:
        """What a step does, in order."""
        scoring = [(m, r) for r in self.judges for m in ("activate", "score", "deactivate")]
        training = [("acquire", "trainer"), ("train", "trainer"), ("release", "trainer")]
        return (
            ("begin_batch", "rollout"),
            ("generate", "rollout"),
            *(() if "acknowledge_releases" in self.allow else (("deactivate", "rollout"),)),
            ("acknowledge", "rollout"),
            *scoring,
            ("publish", ""),
            ("commit", ""),
            *(training if "trainer" in self.roles else []),
            ("acquire", "rollout"),
            ("release", "rollout"),
            ("done", ""),
        )

    @property
    def way_down(self) -> tuple[tuple[str, str], ...]:
        """What the end of a run does, in order."""
        engines = [("stop", r) for r in self.roles if r != "trainer"]
        trainer = [("deactivate", "trainer"), ("end", "trainer")]
        return (*engines, *(trainer if "trainer" in self.roles else []), ("close", ""))

    def action(self, step: Step) -> tuple[str, str]:
        """What a step, or the end of a run, does now. Before its end (``pc`` below 0) every role
        lets go under a lease that was begun anew."""
        if step.mode != "down":
            return self.plan[step.pc]
        return self.way_down[step.pc] if step.pc >= 0 else ("deactivate", self.roles[step.pc])

    def initial(self) -> State:
        engines = (Engine(),) * self.replicas
        roles = tuple(
            Role(engines=(Engine(),) if role == "trainer" else engines) for role in self.roles
        )
        return State(new_book(self.roles), roles, self.faults)


def has_left(config: Config, state: State, role: str) -> bool:
    """Whether the workflow of a role was stopped: nobody can ask it any more."""
    stops = ("stop", role)
    down = state.step.mode == "down" and stops in config.way_down
    return down and state.step.pc > config.way_down.index(stops)


def batch_of(step: Step) -> str:
    """The name that a step's attempt gives its batch."""
    return f"step-{step.attempt}"


def ended(state: State) -> bool:
    """The run is over and every role let go."""
    return state.step.mode == "ended"


def shown(config: Config, state: State) -> str:
    """One line: leases, engines, batch."""
    parts = []
    for name, role in zip(config.roles, state.roles, strict=True):
        lease = state.book.lease(name)
        engines = "/".join(str(engine.gpu) for engine in role.engines)
        token = lease.token.counter if lease.token else 0
        parts.append(f"{name} {lease.state}:{token} [{engines}]")
    batch = state.book.batch
    parts.append(f"batch {batch.name} {batch.state}" if batch else "no batch")
    return "  ".join(parts)
