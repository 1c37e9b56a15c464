"""Imports Trinity-RFT's configuration files (0.3 to 0.6)."""

from __future__ import annotations

from typing import Any

from rollmill.config.importing.foreign import ForeignSettings, ImportedRun, hub_or_path, number, put_steps, whole

_ALGORITHMS = {
    "sft": "sft", "ppo": "ppo", "grpo": "grpo", "dapo": "dapo", "reinforceplusplus": "reinforce_plus_plus",
    "rloo": "rloo", "opmd": "opmd", "asymre": "asymre", "dpo": "dpo", "topr": "topr", "cispo": "cispo", "gspo": "gspo",
    "sapo": "sapo", "mix": "mix", "mix_chord": "chord", "raft": "raft", "sppo": "sppo", "rec": "rec",
    "multi_step_grpo": "stepwise_grpo", "gigpo": "gigpo", "on_policy_distill": "distill", "jsd": "jsd",
}  # fmt: skip
_OFFLINE = ("sft", "dpo")
_AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
    "seq-mean-token-sum": "sequence-sum-mean",
    "seq-mean-token-sum-norm": "constant",
}
_REWARDS = {
    "math_reward": "math", "math_boxed_reward": "math", "math_dapo_reward": "math", "accuracy_reward": "math",
    "countdown_reward": "math",
}  # fmt: skip
_T, _B = "buffer.explorer_input.taskset", "buffer.trainer_input.experience_buffer"
_UNNEEDED = (
    "project", "checkpoint_root_dir", "cluster", "monitor", "service", "log", "buffer.max_retry", "buffer.cache",
    "buffer.pad_token", "explorer.runner", "explorer.rollout_model", "explorer.engine", "explorer.auxiliary_models.",
    "explorer.max_", "explorer.name", "explorer.env_vars", "trainer.trainer_type", "trainer.trainer_config",
    "trainer.ulysses", "trainer.use_dynamic_bsz", "trainer.trainer_strategy", "trainer.name", "trainer.enable_preview",
    "trainer.save_strategy", "trainer.fix_actor", "synchronizer.sync_timeout", "synchronizer.wait",
    "synchronizer.ray_namespace", "continue_from_checkpoint", "ray_namespace", "model.max_prompt_tokens",
    "model.enable_prompt", "model.max_model_len", f"{_T}.name", f"{_T}.storage_type", f"{_B}.name", "buffer.pipeline",
    f"{_B}.storage_type", f"{_B}.enable_progress_bar", f"{_T}.rollout_args.logprobs", "stage", "preserve",
    f"{_T}.enable_progress_bar", "model.tinker", "model.enable",
)  # fmt: skip


def import_trinity(settings: ForeignSettings, *, rows: int | None) -> ImportedRun:
    """Makes a run of a Trinity-RFT configuration; see `import_trl` for `rows`.

    Raises ConfigError if a value is wrong.
    """
    run = ImportedRun("Trinity-RFT")
    run.put("name", settings.take("name", "trinity"))
    kind = str(settings.take("algorithm.algorithm_type", "ppo")).lower()
    if kind not in _ALGORITHMS:
        run.lost["algorithm.algorithm_type"] = f"{kind}: see `rollmill algorithms`"
    name = _ALGORITHMS.get(kind, "grpo")
    run.put("algorithm.name", name)
    mode = settings.take("mode", "both")
    if mode in ("explore", "serve", "bench") or (mode == "train" and name not in _OFFLINE):
        run.notes.append(f"mode {mode}: imported as one run that explores and trains; see docs/guide/modes.md")
    path = hub_or_path(settings.take("model.model_path"))
    run.put("model.path", None if str(path).startswith("/PATH/TO") else path)
    if "path" not in run.sections.get("model", {}):
        run.notes.append("model.path: the file names no model; give a folder or an id")
    batch = whole(settings.take("buffer.batch_size", settings.take("buffer.train_batch_size", 1)), "buffer.batch_size")
    if name in _OFFLINE:
        batch = whole(settings.take("buffer.train_batch_size", batch), "buffer.train_batch_size")
        run.put("algorithm.batch", batch)
        run.put("taskset", _taskset(run, settings, _B))
        settings.take("model.max_response_tokens")
    else:
        _rollouts(run, settings, batch)
    _loss(run, settings, name)
    _optimizer(run, settings)
    _steps(run, settings, batch, rows)
    run.finish(settings, _UNNEEDED)
    return run


def _taskset(run: ImportedRun, settings: ForeignSettings, at: str) -> dict[str, Any]:
    """Returns the section of a file; columns are named by `format`."""
    path = hub_or_path(settings.take(f"{at}.path")) or "data/train.jsonl"
    found: dict[str, Any] = {"path": path}
    if path.startswith("hf://"):
        found |= {"split": settings.take(f"{at}.split", "train")}
        subset = settings.take(f"{at}.subset_name")
        found |= {} if subset is None else {"subset": subset}
    columns = {"prompt_key": "prompt", "chosen_key": "response", "rejected_key": "rejected"}
    fields = {
        ours: value for key, ours in columns.items() if (value := settings.take(f"{at}.format.{key}")) is not None
    }
    answer = settings.take(f"{at}.format.response_key")
    if answer is not None:
        fields["response" if at == _B else "answer"] = answer
    known = {("prompt", "question"), ("answer", "answer"), ("response", "chosen"), ("rejected", "rejected")}
    usual = {**{key: key for key in ("prompt", "answer", "response", "rejected")}}
    if any(value != usual[key] and (key, value) not in known for key, value in fields.items()):
        found["fields"] = fields
    system = settings.take(f"{at}.format.system_prompt")
    messages = str(settings.take(f"{at}.format.prompt_type", "plaintext")) == "messages"
    if at == _T or not messages:
        found |= {"chat": True} | ({} if system is None else {"system": system})
    settings.take(f"{at}.format.messages_key")
    settings.take(f"{at}.subset_name")
    settings.take(f"{at}.split")
    return found


def _rollouts(run: ImportedRun, settings: ForeignSettings, batch: int) -> None:
    run.put("taskset", _taskset(run, settings, _T))
    group = settings.take(f"{_T}.rollout_args.n", 1)
    run.put("rollout.batch", batch)
    run.put("rollout.group_size", whole(settings.take("algorithm.repeat_times", group), "algorithm.repeat_times"))
    run.put("rollout.max_new_tokens", settings.take("model.max_response_tokens"))
    for key in ("temperature", "top_p"):
        run.put(f"rollout.{key}", settings.take(f"{_T}.rollout_args.{key}"))
    top = settings.take(f"{_T}.rollout_args.top_k")
    run.put("rollout.top_k", top if isinstance(top, int) and top > 0 else None)
    held_out = settings.take("buffer.explorer_input.eval_tasksets") or []
    sets = {str(each.get("name", n)): ForeignSettings({"set": each}) for n, each in enumerate(held_out)}
    for name, one in sets.items():
        run.put(f"evaluation.sets.{name}.taskset", _taskset(run, one, "set") | {"chat": True})
    if sets:
        run.put("evaluation.every", settings.take("explorer.eval_interval"))
        run.put("evaluation.at_start", settings.take("explorer.eval_on_startup"))
    settings.take("explorer.eval_interval")
    settings.take("explorer.eval_on_startup")
    workflow = settings.take(
        f"{_T}.default_workflow_type", settings.take("buffer.explorer_input.default_workflow_type")
    )
    if workflow not in (None, "math_workflow", "simple_workflow", "math_boxed_workflow", "async_math_workflow"):
        run.lost["default_workflow_type"] = f"{workflow}: a workflow is a function here; docs/guide/workflows.md"
    reward = settings.take(
        f"{_T}.default_reward_fn_type", settings.take("buffer.explorer_input.default_reward_fn_type", "math_reward")
    )
    if reward in _REWARDS:
        run.put("rewards", [{"name": _REWARDS[reward]}])
    else:
        run.put("rewards", [{"name": "python", "function": f"rewards.py:{reward}"}])
        run.lost["default_reward_fn_type"] = (
            f"{reward}: write `def {reward}(task, completion) -> float` into rewards.py"
        )
    interval = whole(settings.take("synchronizer.sync_interval", 1), "synchronizer.sync_interval")
    offset = whole(settings.take("synchronizer.sync_offset", 0), "synchronizer.sync_offset")
    style = str(settings.take("synchronizer.sync_style", "fixed"))
    if interval > 1 or offset:
        run.put("max_staleness", interval - 1 + offset)
    if style not in ("fixed", "static"):
        run.notes.append(f"synchronizer.sync_style {style}: how far rollouts may lag is max_staleness alone")
    settings.take("synchronizer.sync_method")


def _loss(run: ImportedRun, settings: ForeignSettings, name: str) -> None:
    given = settings.section("algorithm.policy_loss_fn_args")
    low, high = (
        given.get("clip_range_low", given.get("clip_range")),
        given.get("clip_range_high", given.get("clip_range")),
    )
    if low is not None or high is not None:
        run.put("algorithm.loss.clip_low", low)
        run.put("algorithm.loss.clip_high", high)
    for key in given.keys() - {"clip_range", "clip_range_low", "clip_range_high", "loss_agg_mode"}:
        run.lost[f"algorithm.policy_loss_fn_args.{key}"] = f"see the keys of the algorithm: rollmill explain {name}"
    aggregation = settings.take("algorithm.loss_agg_mode", given.get("loss_agg_mode"))
    if name not in ("dpo",):
        run.put("algorithm.aggregation", _AGGREGATIONS.get(str(aggregation)))
    penalty, weight = (
        settings.take("algorithm.kl_loss_fn"),
        settings.section("algorithm.kl_loss_fn_args").get("kl_coef"),
    )
    if name == "dpo":
        run.put("algorithm.beta", weight)
    elif weight and penalty != "none" and name != "sft":
        estimator = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3", "abs": "abs"}.get(str(penalty), "k3")
        run.put("algorithm.kl", {"coefficient": number(weight, "kl_coef"), "estimator": estimator})
    entropy = settings.section("algorithm.entropy_loss_fn_args").get("entropy_coef")
    run.put("algorithm.entropy", entropy if entropy and name not in _OFFLINE else None)


def _optimizer(run: ImportedRun, settings: ForeignSettings) -> None:
    optim = "algorithm.optimizer"
    run.put("trainer.lr", number(settings.take(f"{optim}.lr", 1e-6), f"{optim}.lr"))
    betas = settings.take(f"{optim}.betas", [0.9, 0.999])
    run.put("trainer.betas", [number(each, f"{optim}.betas") for each in betas])
    run.put("trainer.weight_decay", settings.take(f"{optim}.weight_decay", 0.01))
    schedule = str(settings.take(f"{optim}.lr_scheduler_type", settings.take(f"{optim}.warmup_style", "constant")))
    run.put("trainer.schedule", schedule if schedule in ("cosine", "linear") else "constant")
    least = settings.take(f"{optim}.min_lr_ratio")
    run.put("trainer.min_lr_ratio", least if schedule in ("cosine", "linear") else None)
    run.put("trainer.max_grad_norm", settings.take("trainer.grad_clip", 1.0))
    run.put("trainer.micro_batch_tokens", settings.take("trainer.max_token_len_per_gpu"))


def _steps(run: ImportedRun, settings: ForeignSettings, batch: int, rows: int | None) -> None:
    most = settings.take("buffer.total_steps", settings.take("trainer.total_steps"))
    settings.take("trainer.total_steps")
    epochs = settings.take("buffer.total_epochs", 1)
    steps = put_steps(run, most, epochs, rows, batch, ("total_steps", "buffer.total_epochs"))
    optim = "algorithm.optimizer"
    early = settings.take(f"{optim}.lr_warmup_steps", -1)
    share = number(settings.take(f"{optim}.lr_warmup_steps_ratio", 0.0), "lr_warmup_steps_ratio")
    run.put("trainer.warmup_steps", (int(early) if int(early) > 0 else round(share * steps)) or None)
    run.put("checkpoint.every", settings.take("trainer.save_interval"))
