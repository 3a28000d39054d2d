"""Timeouts and retries of every activity, in one table.

Work that cannot be repeated blindly (a lifecycle call, a POST to an engine) has one attempt here;
it is repeated above, by a state machine that knows what is safe. Idempotent work retries with
backoff. Every activity heartbeats: a worker that dies is noticed after ``heartbeat`` seconds.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Queue = Literal["relax", "relax-engines", "relax-train"]
QUEUES: tuple[Queue, ...] = get_args(Queue)

ONCE = 1
FOREVER = 0


@dataclass(frozen=True)
class ActivityPolicy:
    """How one activity is run.

    Attributes:
        queue: task queue.
        start_to_close: seconds that one attempt may take.
        attempts: attempts that Temporal makes; ``FOREVER`` until the schedule runs out.
        heartbeat: seconds of silence after which the attempt counts as lost.
        first_retry: seconds before the second attempt; doubles up to ``max_retry``.
    """

    queue: Queue
    start_to_close: float
    attempts: int
    heartbeat: float = 8.0
    first_retry: float = 0.5
    max_retry: float = 15.0


_LIGHT = ActivityPolicy("relax", start_to_close=60.0, attempts=6)
_ENGINE_ONCE = ActivityPolicy("relax-engines", start_to_close=900.0, attempts=ONCE)
_ENGINE_READ = ActivityPolicy("relax-engines", start_to_close=60.0, attempts=6)
_TRAIN_ONCE = ActivityPolicy("relax-train", start_to_close=900.0, attempts=ONCE)
_PHASE = ActivityPolicy("relax", start_to_close=7200.0, attempts=ONCE)

POLICIES: dict[str, ActivityPolicy] = {
    "resolve_recipe": ActivityPolicy("relax", start_to_close=600.0, attempts=6),
    # Ends by itself after the recipe's cluster.bind_timeout.
    "bind_placement": ActivityPolicy("relax-engines", start_to_close=86400.0, attempts=6),
    "release_placement": ActivityPolicy("relax-engines", start_to_close=120.0, attempts=6),
    # Ends by itself after the operation's provision timeout.
    "bind_added_replica": ActivityPolicy("relax-engines", start_to_close=86400.0, attempts=3),
    "release_added_replica": ActivityPolicy("relax-engines", start_to_close=120.0, attempts=6),
    # Ends by itself after the operation's drain timeout; it only looks.
    "drain_engine": ActivityPolicy("relax-engines", start_to_close=86400.0, attempts=6),
    # Ends by itself after the policy's interval.
    "look_at_load": ActivityPolicy("relax-engines", start_to_close=86400.0, attempts=3),
    # They end by themselves after the asked timeout; what they load, they load again.
    "check_external": ActivityPolicy("relax", start_to_close=86400.0, attempts=3),
    "drain_external": ActivityPolicy("relax", start_to_close=86400.0, attempts=3),
    "watch_externals": ActivityPolicy("relax", start_to_close=604800.0, attempts=FOREVER),
    "ensure_front": ActivityPolicy("relax", start_to_close=180.0, attempts=6),
    "push_registry": ActivityPolicy("relax", start_to_close=60.0, attempts=FOREVER, max_retry=2.0),
    "stop_front": _LIGHT,
    "onload_engines": _ENGINE_ONCE,
    "offload_engines": _ENGINE_ONCE,
    "launch_engines": _ENGINE_ONCE,
    "load_engine_weights": _ENGINE_ONCE,
    "stop_engines": _ENGINE_ONCE,
    "forget_engines": _ENGINE_ONCE,
    "watch_engines": ActivityPolicy("relax-engines", start_to_close=604800.0, attempts=FOREVER),
    "probe_engines": _ENGINE_READ,
    "confirm_rollout_offload": _LIGHT,
    "confirm_genrm_offload": _LIGHT,
    "confirm_teacher_offload": _LIGHT,
    "confirm_trainer_offload": _LIGHT,
    "generate_groups": _PHASE,
    "judge_samples": _PHASE,
    "teach_samples": _PHASE,
    "evaluate_policy": _PHASE,
    "write_back_scores": ActivityPolicy("relax", start_to_close=900.0, attempts=4),
    "open_transfer_queue": ActivityPolicy("relax-train", start_to_close=300.0, attempts=4),
    "publish_batch": ActivityPolicy("relax-train", start_to_close=600.0, attempts=6),
    "clear_partition": ActivityPolicy("relax-train", start_to_close=120.0, attempts=6),
    "close_transfer_queue": ActivityPolicy("relax-train", start_to_close=120.0, attempts=4),
    "finalise_batch": ActivityPolicy("relax", start_to_close=600.0, attempts=4),
    "onload_trainer": _TRAIN_ONCE,
    "offload_trainer": _TRAIN_ONCE,
    "stop_trainer": _TRAIN_ONCE,
    "forget_trainer": _TRAIN_ONCE,
    "probe_trainer": ActivityPolicy("relax-train", start_to_close=60.0, attempts=6),
    "train_step": ActivityPolicy("relax-train", start_to_close=86400.0, attempts=ONCE),
    "write_step_record": _LIGHT,
}
