"""From the reference's command line to a recipe, with an account of every flag.

A flag that is not in the recipe afterwards is told, with the reason: nothing is dropped silently.
"""

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_infer.compat._flag_error import FlagError
from relax_infer.compat._flag_table import SGLANG_OF_ROLLOUT, TABLE, To
from relax_infer.compat._resources import INFERENCE, TRAINING, cluster_gpus, gpus_by_role

__all__ = ["Converted", "FlagError", "convert_flags", "flags_of_script"]

_ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(?!\()(.*)$")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_ENDS = frozenset({";", "&", "|", "&&", "||", ">", ">>", "2>&1"})
_USED = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_RULES = {"math": "math_verify", "deepscaler": "math_verify", "dapo": "math_verify"}


@dataclass(frozen=True)
class Converted:
    """A recipe, as YAML would hold it, and what a person should know about it.

    Attributes:
        recipe: sections and fields; not validated yet.
        notes: flag, without dashes, and what became of it where that is not a field.
    """

    recipe: dict[str, Any]
    notes: dict[str, str] = field(default_factory=dict)


def flags_of_script(text: str) -> list[str]:
    """The flags in a launch script, in order: those of its arrays and of its last command.

    Variables that the script gives a plain value are filled in; others stay as they are written.
    """
    kept: list[str] = []
    known: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        assigned = _ASSIGNED.match(line)
        if assigned:
            words = _split(_filled(assigned[2], known))
            known[assigned[1]] = words[0] if words else ""
        else:
            kept.append(line)
    words = _split(_filled("\n".join(kept), known))
    return [word for word in _training_words(words) if not word.startswith("${")]


def _training_words(words: Iterable[str]) -> Iterator[str]:
    """What is in arrays, and what follows the name of a Python program: flags of other commands,
    such as ``ray start``, are not the training's."""
    array = command = False
    for word in words:
        opened = _ARRAY.match(word)
        if opened:
            array, word = True, word[opened.end() :]
        closes = array and word.endswith(")")
        if closes:
            word = word[:-1]
        command = (command or word.endswith(".py")) and word not in _ENDS
        if word and (array or (command and not word.endswith(".py"))):
            yield word
        array = array and not closes


def convert_flags(words: Sequence[str], *, name: str = "converted") -> Converted:
    """
    Args:
        words: as a shell splits them, ``--flag value``, ``--flag=value`` or a bare ``--flag``.
        name: of the recipe.

    Raises:
        FlagError: a word that belongs to no flag, or a flag whose value cannot be read.
    """
    given = _parsed(words)
    if not given:
        raise FlagError("there are no flags.", cure="Name a launch script, or give flags after --.")
    return _Conversion(given, name).converted()


def _parsed(words: Iterable[str]) -> dict[str, Any]:
    given: dict[str, list[Any]] = {}
    last: str | None = None
    for word in words:
        if word.startswith("--"):
            last, equals, value = word[2:].partition("=")
            last = last.replace("_", "-")
            given[last] = [_value(value)] if equals else []
        elif last is None:
            raise FlagError(f"{word!r} belongs to no flag.", cure="Begin with a --flag.")
        else:
            given[last].append(_value(word))
    return {
        flag: True if not values else values[0] if len(values) == 1 else values
        for flag, values in given.items()
    }


def _value(word: str) -> Any:
    if _NUMBER.fullmatch(word):
        return float(word) if re.search(r"[.eE]", word) else int(word)
    return {"true": True, "false": False}.get(word.lower(), word)


class _Conversion:
    """One command line on its way. Every flag is taken out of ``given`` by what deals with it."""

    def __init__(self, given: dict[str, Any], name: str) -> None:
        self.given = given
        self.recipe: dict[str, Any] = {"name": name}
        self.notes: dict[str, str] = {}

    def converted(self) -> Converted:
        # Those that depend on each other first; what they leave stands for itself.
        self._mode()
        self._genrm()
        self._reward()
        self._kl()
        self._importance()
        self._betas()
        self._data()
        if "rollout-max-response-len" not in self.given:
            self.notes["rollout-max-response-len"] = (
                "was not given: rollout.sampling.max_new_tokens is the default"
            )
        concurrency = self.given.pop("sglang-server-concurrency", None)
        mini_batch = self.given.pop("global-batch-size", None)
        for flag in list(self.given):
            self._alone(flag, self.given.pop(flag))
        self._replicas("rollout", concurrency)
        self._replicas("teacher", None)
        self._mini_batches(mini_batch)
        if self.get("train.algorithm.estimator") == "ppo":
            self.put("critic.ranks", self.get("critic.ranks", self.get("train.ranks", 1)))
        elif self.recipe.pop("critic", None):
            self.notes["critic"] = "only --advantage-estimator ppo uses one"
        return Converted(self.recipe, self.notes)

    # --- the recipe

    def put(self, dotted: str, value: Any) -> None:
        *path, last = dotted.split(".")
        here = self.recipe
        for part in path:
            here = here.setdefault(part, {})
        here[last] = value

    def get(self, dotted: str, default: Any = None) -> Any:
        here: Any = self.recipe
        for part in dotted.split("."):
            if not isinstance(here, dict) or part not in here:
                return default
            here = here[part]
        return here

    def _alone(self, flag: str, value: Any) -> None:
        rule = TABLE.get(flag)
        if rule is None and flag.startswith(SGLANG_OF_ROLLOUT):
            name = flag.removeprefix(SGLANG_OF_ROLLOUT).replace("-", "_")
            self.put(f"rollout.engine.server_args.{name}", value)
        elif rule is None:
            self.notes[flag] = "is not known and was left out"
        elif not isinstance(rule, To):
            if value != rule.unless:
                self.notes[flag] = rule.why
        elif rule.words is None:
            self.put(rule.field, self._object(flag, value) if flag.endswith("kwargs") else value)
        elif str(value) in rule.words:
            self.put(rule.field, rule.words[str(value)])
        else:
            known = ", ".join(rule.words)
            self.notes[flag] = f"{value!r} has no counterpart in {rule.field} ({known})"

    # --- flags that belong together

    def _mode(self) -> None:
        resource = self._object("resource", self.given.pop("resource", None))
        gpus = gpus_by_role(resource)
        colocate = bool(self.given.pop("colocate", False))
        deferred = self.given.pop("inference-defer-roles", None)
        shared = colocate or deferred is not None
        if deferred is not None:
            roles = deferred if isinstance(deferred, list) else str(deferred).split(",")
            self.put("mode", "defer")
            self.put("defer_roles", [str(role).strip() for role in roles])
        else:
            self.put("mode", "split" if colocate else "decoupled")
        nodes = self.given.pop("actor-num-nodes", None)
        per_node = self.given.get("actor-num-gpus-per-node")
        if isinstance(nodes, int) and isinstance(per_node, int):
            actor = gpus.setdefault("actor", nodes * per_node)
            if actor != nodes * per_node:
                self.notes["actor-num-nodes"] = (
                    f"{nodes} x {per_node} GPUs, --resource says {actor}: {actor} are used"
                )
        if colocate and "actor" not in gpus:
            self.notes["colocate"] = (
                "the actor has no GPUs that the others could share: give --resource with an actor,"
                " or set cluster.gpus and train.ranks"
            )
        self._engines(gpus, shared=shared)
        self._training(gpus)
        if gpus:
            self.put("cluster.gpus", cluster_gpus(gpus, shared=shared))
        if "actor" in gpus:
            self.put("train.ranks", gpus["actor"])

    def _engines(self, gpus: dict[str, int], *, shared: bool) -> None:
        """GPUs of the roles with engines; a flag of their own wins, in the cluster that
        ``--resource`` describes."""
        if "teacher" in gpus and "opd-teacher-model-path" not in self.given:
            del gpus["teacher"]
            self.notes["resource.teacher"] = "there is no --opd-teacher-model-path: left out"
        for role, flag in INFERENCE.items():
            if role not in gpus:
                continue
            own = self.given.setdefault(flag, gpus[role])
            if own != gpus[role]:
                self.notes[flag] = f"is {own}, --resource says {gpus[role]}: {own} are used"
        told = "rollout" in gpus or "rollout-num-gpus" in self.given
        if "actor" in gpus and not told and shared:
            self.given["rollout-num-gpus"] = gpus["actor"]
            self.notes["rollout-num-gpus"] = "was not given: the rollout has the actor's GPUs"

    def _training(self, gpus: dict[str, int]) -> None:
        """Ranks of the training roles beside the actor."""
        for role in [role for role in gpus if role != "actor" and role not in INFERENCE]:
            if role not in TRAINING:
                known = ", ".join(("actor", *INFERENCE, *TRAINING))
                self.notes[f"resource.{role}"] = f"is not one of {known}: left out"
                del gpus[role]
            elif role == "critic" and self.given.get("advantage-estimator") != "ppo":
                self.notes["resource.critic"] = "only --advantage-estimator ppo uses one: left out"
                del gpus[role]
            else:
                self.put(f"{role}.ranks", gpus[role])
                if role != "critic":
                    self.notes[f"resource.{role}"] = (
                        f"has GPUs in the plan, but runs do not use it yet: remove {role} to run"
                    )

    def _genrm(self) -> None:
        engine = self._object("genrm-engine-config", self.given.pop("genrm-engine-config", None))
        sampling = self._object(
            "genrm-sampling-config", self.given.pop("genrm-sampling-config", None)
        )
        if "genrm-model-path" not in self.given:
            return
        for flag in [flag for flag in self.given if flag.startswith("genrm-") and flag in TABLE]:
            if flag in self.given:
                self._alone(flag, self.given.pop(flag))
        concurrency = engine.pop("server_concurrency", None)
        for name, value in engine.items():
            self.put(f"genrm.engine.server_args.{name}", value)
        self._replicas("genrm", concurrency)
        places = {
            "temperature": "genrm.sampling.temperature",
            "top_p": "genrm.sampling.top_p",
            "max_response_len": "genrm.max_new_tokens",
            "chat_template_kwargs": "genrm.chat_template_kwargs",
        }
        for name, value in sampling.items():
            if name in places:
                self.put(places[name], value)
            elif name != "top_k":
                self.notes[f"genrm-sampling-config.{name}"] = "is not known and was left out"
            elif value != -1:
                self.put("genrm.sampling.top_k", value)
        self.notes["genrm"] = (
            "write genrm.prompt and genrm.verdict: what the judge is shown and how its answer is"
            " read was code beside the flags"
        )

    def _reward(self) -> None:
        kind = self.given.pop("rm-type", None)
        if kind is None:
            return
        if "genrm" in str(kind):
            self.put("reward.source", "genrm")
        elif kind in _RULES:
            self.put("reward.source", _RULES[kind])
        else:
            self.notes["rm-type"] = (
                f"{kind!r} has no counterpart: set reward.source to one of the shipped rewards or"
                " to package.module:name of a RewardAdapter"
            )

    def _kl(self) -> None:
        in_loss = bool(self.given.pop("use-kl-loss", False))
        loss, reward = (self.given.pop(flag, 0.0) for flag in ("kl-loss-coef", "kl-coef"))
        if in_loss and loss:
            self.put("train.algorithm.kl_coefficient", loss)
            if reward:
                self.notes["kl-coef"] = "the KL is in the loss already"
        elif reward:
            self.put("train.algorithm.kl_coefficient", reward)
            self.put("train.algorithm.kl_in", "reward")

    def _importance(self) -> None:
        if self.given.pop("use-tis", False):
            self.put("train.algorithm.old_log_probs", "trainer")
            self.put("train.algorithm.importance", "token")

    def _betas(self) -> None:
        first, second = (self.given.pop(flag, None) for flag in ("adam-beta1", "adam-beta2"))
        if first is not None or second is not None:
            self.put("train.betas", [0.9 if first is None else first, second or 0.999])

    def _data(self) -> None:
        if "prompt-data" in self.given:
            self.put("data.source", "file")
            for flag in ("apply-chat-template", "rollout-shuffle"):
                self.given.setdefault(flag, False)
            self.given.setdefault("label-key", "")

    def _replicas(self, role: str, concurrency: Any) -> None:
        gpus = self.get(f"{role}.num_gpus")
        each = self.get(f"{role}.engine.gpus_per_replica", 1)
        if isinstance(gpus, int) and isinstance(each, int) and each > 0 and gpus % each == 0:
            self.put(f"{role}.engine.replicas", gpus // each)
        elif gpus is not None:
            raise FlagError(f"{role}: {gpus} GPUs are no whole number of engines of {each}.")
        if isinstance(concurrency, int):
            replicas = self.get(f"{role}.engine.replicas", 1)
            self.put(f"{role}.max_concurrency", concurrency * replicas)

    def _mini_batches(self, mini_batch: Any) -> None:
        if mini_batch is None:
            return
        prompts = self.get("rollout.prompts_per_step", 32)
        samples = prompts * self.get("rollout.samples_per_prompt", 8)
        if not isinstance(mini_batch, int) or mini_batch < 1 or samples % mini_batch:
            raise FlagError(
                f"--global-batch-size {mini_batch}: a step's {samples} samples are no whole number"
                " of such batches."
            )
        self.put("train.mini_batches", samples // mini_batch)

    def _object(self, flag: str, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        try:
            read = json.loads(value)
        except (TypeError, ValueError) as error:
            raise FlagError(f"--{flag} {value}: not JSON: {error}") from None
        if not isinstance(read, dict):
            raise FlagError(f"--{flag} {value}: not a JSON object.")
        return read


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise FlagError(f"The script cannot be read as a shell would: {error}.") from None


def _filled(text: str, known: dict[str, str]) -> str:
    return _USED.sub(lambda used: known.get(used[1], used[0]), text)
