"""Parts of the recipe that placement reads: cluster, engines, training ranks."""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from relax_infer.config.documents import check_json
from relax_infer.config.typed import check_kind
from relax_infer.contracts.fractions import GpuFraction, check_gpu_fraction

MOST = 1 << 53
"""Of whatever is counted."""
Positive = Annotated[int, Field(ge=1, le=MOST)]
MOST_GPUS = 1 << 20
"""Of a cluster, and so of anything in it."""
Count = Annotated[int, Field(ge=1, le=MOST_GPUS)]
"""Of GPUs, engines or ranks."""
Seed = Annotated[int, Field(ge=0, le=MOST)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Scalar = str | int | float | bool | None


def _fraction_or_auto(value: object) -> object:
    return value if value == "auto" else check_gpu_fraction(value)


EngineFraction = Annotated[float | Literal["auto"], BeforeValidator(_fraction_or_auto)]


_MODEL_ID = r"^(?!__default__$)[^\s/]([^/\r\n]*[^\s/])?$"


def _model_id(name: str) -> str:
    """Part of engines' ids, which have a slash behind it; ``__default__`` asks for the only one."""
    if not re.fullmatch(_MODEL_ID, name) or not name.isprintable():
        raise ValueError(
            "must be a name without / and without blanks around it, of printable characters, not"
            " __default__, which means a role's only model"
        )
    return name


def _shown(name: str) -> str:
    """Terminals, pages and pictures have it as it is."""
    if not name.isprintable():
        raise ValueError("must be of printable characters")
    return name


ShownName = Annotated[str, AfterValidator(_shown)]
ModelId = Annotated[str, AfterValidator(_model_id), Field(json_schema_extra={"pattern": _MODEL_ID})]


def _flags(server_args: dict[str, Scalar]) -> dict[str, Scalar]:
    """What is no name would end up as another flag, or as two, on the engine's command line."""
    for name in server_args:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ValueError(
                f"{name!r} is no flag: write its name without the dashes before it, and its value"
                " behind the colon"
            )
    return server_args


Free = Annotated[dict[str, Any], AfterValidator(check_json)]
"""For somebody else to read."""
ServerArgs = Annotated[dict[str, Scalar], AfterValidator(_flags)]


OWN_RULES = "own_rules"
"""Key of the validation context; False: fields of one section that contradict each other are no
error."""


def own_rules(info: ValidationInfo) -> bool:
    """Whether a section is to look at what its fields are together."""
    return info.context is None or info.context.get(OWN_RULES, True)


def _regular(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


Pattern = Annotated[str, AfterValidator(_regular)]
"""A regular expression of Python."""


class Section(BaseModel):
    """A part of the recipe: frozen; unknown fields, texts as numbers and what is no number are
    refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_kind(cls, value: object, info: ValidationInfo) -> object:
        return check_kind(value, cls.model_fields[str(info.field_name)])


class Cluster(Section):
    """The GPUs of the run."""

    gpus: Count
    """GPUs of all pools together. In modes defer and split the roles share what training roles
    with a pool of their own leave."""
    gpus_per_node: Count | None = None
    """GPUs of one node; empty: all of them are on one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the engines and the trainer compute on; auto: cuda where the host has one."""
    bind_timeout: Seconds = 60.0
    """Seconds that Ray may take to place the pool."""


class Engine(Section):
    """How the engines of a model are run."""

    replicas: Count = 1
    """Engines of this model."""
    gpus_per_replica: Count = 1
    """GPUs of one engine: its tensor parallel size times its pipeline parallel size. More than a
    node has: whole nodes."""
    ray_gpu_fraction: EngineFraction = 0.2
    """Share of a GPU, from 0 to 1, that an engine actor reserves with Ray in the first bundle that
    it has on each node; auto: 0.2, or less where the roles of a bundle would reserve more than
    one GPU together."""
    offload: Literal["memory_saver", "restart", "none"] = "memory_saver"
    """How it lets go: SGLang's release and resume, or a confirmed stop and a later start. none: it
    stays, which can be planned in mode decoupled, not run yet."""
    python: str | None = None
    """Interpreter of the engine processes; empty: the worker's own."""
    server_args: ServerArgs = Field(default_factory=dict)
    """Further SGLang flags, without the dashes before them; `tp_size` and `tp-size` are the same.
    true is a bare flag."""
    launch_timeout: Seconds = 300.0
    """Seconds from launch to an answering engine."""
    drain_timeout: Seconds = 120.0
    """Seconds that requests may take to end once admission is closed."""
    health_timeout: Seconds = 60.0
    """Seconds without a sign of life after which an engine is given up and rebuilt."""


class ServerGroup(Section):
    """Engines of one kind. What is not said here is as in the model's engine section."""

    worker_type: Literal["regular", "prefill", "decode"] = "regular"
    """regular, or the engine's part in prefill/decode disaggregation."""
    replicas: Count = 1
    """Engines of this group."""
    gpus_per_replica: Count = 1
    """GPUs of one engine of this group."""
    server_args: ServerArgs = Field(default_factory=dict)
    """SGLang flags of this group, over those of the model's engine section."""


class ServedModel(Section):
    """A further model of a role, beside the role's first."""

    model: str
    """Hugging Face folder."""
    model_id: ModelId
    """Name in the role's registry, once per role, without a slash."""
    engine: Engine = Engine()


class RolloutModel(ServedModel):
    """A further model that generates, beside the policy."""

    server_groups: tuple[ServerGroup, ...] | None = None
    """Groups of engines in place of replicas and gpus_per_replica of the engine section."""


class TrainingGroup(Section):
    """Ranks of a training role beside the policy's trainer."""

    ranks: Count
    """GPUs, one for each rank."""
    ray_gpu_fraction: GpuFraction = 0.4
    """Share of a GPU that each rank reserves with Ray."""


class Critic(TrainingGroup):
    """The value model of estimator ppo: the policy's network with one value in place of logits."""

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Constant, or along train.schedule."""
    value_clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.2
    """A value is moved by at most this in one pass over the batch."""
