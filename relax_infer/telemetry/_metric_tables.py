"""The table of :mod:`relax_infer.telemetry.catalogue`: kind | name | labels | unit | meaning."""

TABLES = {
    "worker": """
gauge | relax_run_state | run state | 1 | 1 for the state that the run is in.
gauge | relax_run_step | run | step | Last finished step.
gauge | relax_run_target_steps | run | step | Step after which the run ends.
gauge | relax_run_weight_version | run | version | Weights that the policy engines hold.
gauge | relax_step_phase | run phase | step | Number of the open step that is in this phase.
gauge | relax_step_elapsed_seconds | run | seconds | Since the oldest open step began.
gauge | relax_step_expected_seconds | run | seconds | Median of the last 20 finished steps.
counter | relax_steps_total | run | steps | Steps that finished since the worker looks.
counter | relax_step_seconds_total | run | seconds | Their time from first to last phase.
counter | relax_step_phase_seconds_total | run phase | seconds | Their time by phase.
gauge | relax_lease_state | run role state | 1 | 1 for the state of the role's lease.
gauge | relax_lease_fence | run role | counter | Counter of the role's last fence token.
counter | relax_lease_held_seconds_total | run role | seconds | Time in which the role held its GPUs, since the worker looks.
gauge | relax_replicas | run role model state | replicas | Engine replicas in this state.
gauge | relax_recoveries | run role state | recoveries | Recoveries of lost replicas ever begun, by where they stand; ABANDONED: every restart was used.
gauge | relax_reward_mean | run | reward | Mean reward of the last batch.
gauge | relax_reward_std | run | reward | Standard deviation of it.
gauge | relax_accuracy | run | share | Greedy accuracy on the held-out problems, at the last evaluation.
gauge | relax_exact_share | run | share | Share of the last batch that the task's own checker accepts.
gauge | relax_teacher_kl | run | nats | Rollout minus Teacher log-prob, mean over the last batch's tokens.
gauge | relax_staleness_steps | run | versions | Most versions that a sample's weights were behind those trained on it.
gauge | relax_batch_samples | run | samples | Samples of the last batch.
gauge | relax_batch_dropped_groups | run | groups | Groups of it that were dropped.
gauge | relax_batch_truncated_samples | run | samples | Responses of it that hit their token limit.
gauge | relax_train_loss | run | nats | Loss of the last update.
gauge | relax_train_grad_norm | run | 1 | Global gradient norm before clipping.
gauge | relax_train_tokens_per_second | run | tokens/s | Trained tokens over the update's whole time.
gauge | relax_train_clip_fraction | run | share | Tokens whose ratio was clipped.
gauge | relax_train_policy_kl | run | nats | Rollout minus trainer log-prob, mean over trained tokens.
gauge | relax_train_logprob_gap | run | nats | Mean absolute difference between the engines' and the trainer's log-probs, before the update.
gauge | relax_train_entropy | run | nats | Entropy of the policy over trained tokens.
gauge | relax_train_learning_rate | run | 1 | Of the last update.
gauge | relax_watch_runs | | runs | Open runs that the worker looks at.
gauge | relax_watch_seconds | | seconds | What the last look took.
counter | relax_watch_failures_total | | looks | Looks at a run that failed; its samples are then left out.
""",
    "gateway": """
counter | relax_gateway_requests_total | role route status | requests | Requests that were answered, by status; 499: the caller left first.
histogram | relax_gateway_request_seconds | role route | seconds | From a request's head to its answer's last byte.
gauge | relax_gateway_requests_in_flight | role | requests | Requests under way.
counter | relax_gateway_aborts_total | role | requests | Requests that ended before their backend had answered.
counter | relax_gateway_refused_total | role caller reason | requests | Turned away at the door: no_token, unknown_token, role, rate, concurrency.
gauge | relax_gateway_topology_revision | role | revision | Of the registry that is served.
gauge | relax_gateway_registry_term | role | term | Of the registry that is served.
gauge | relax_gateway_model_ready | role model | 1 | 1: could be called now.
""",
    "guard": """
counter | relax_guard_admitted_total | run role replica | requests | Requests that were handed to the engine.
counter | relax_guard_refused_total | run role replica reason | requests | Requests that never reached it. closed: its gate was; body: too large, or not to be read.
counter | relax_guard_ended_total | run role replica reason | requests | Admitted ones that ended: answered, disconnected, cancelled, failed.
gauge | relax_guard_requests_in_flight | run role replica | requests | Between gate and answer.
gauge | relax_guard_open | run role replica | 1 | 1: the gate admits requests.
gauge | relax_guard_fence | run role replica | counter | Counter of the highest fence token seen.
histogram | relax_guard_drain_seconds | run role replica | seconds | From closing the gate to the engine seen idle.
""",
    "sdk": """
counter | temporal_activity_execution_failed | activity_type | attempts | Activity attempts that failed.
histogram | temporal_activity_execution_latency | activity_type | seconds | Of one attempt.
histogram | temporal_activity_schedule_to_start_latency | task_queue | seconds | Until a worker took it.
histogram | temporal_workflow_task_execution_latency | workflow_type | seconds | Of one workflow task.
counter | temporal_workflow_task_execution_failed | workflow_type | tasks | Workflow tasks that failed; a workflow whose code does not fit its history fails these for ever.
gauge | temporal_worker_task_slots_available | worker_type | slots | Free slots of a worker.
""",
}
