"""Imports Trinity-RFT's configuration files (0.3 to 0.6).

Where a file leaves out what the loss, the order of the tasks or an evaluation depend on, Trinity's default is written.
"""

from __future__ import annotations

from typing import Any

from rollmill.apps.importing.foreign import (
    ForeignSettings,
    ImportedRun,
    hub_or_path,
    number,
    put_schedule,
    put_steps,
    whole,
)

_ALGORITHMS = {
    "sft": "sft", "ppo": "ppo", "grpo": "grpo", "dapo": "dapo", "reinforceplusplus": "reinforce_plus_plus",
    "rloo": "rloo", "opmd": "opmd", "asymre": "asymre", "dpo": "dpo", "topr": "topr", "cispo": "cispo", "gspo": "gspo",
    "sapo": "sapo", "mix": "mix", "mix_chord": "chord", "raft": "raft", "sppo": "sppo", "rec": "rec",
    "multi_step_grpo": "stepwise_grpo", "gigpo": "gigpo", "on_policy_distill": "distill", "jsd": "jsd",
}  # fmt: skip
_OFFLINE = ("sft", "dpo")
_PPO_LOSS = ("ppo", "grpo", "dapo", "reinforceplusplus", "rloo", "multi_step_grpo", "gigpo", "mix", "mix_chord")
"""Algorithms with the loss `ppo`: clipped at 0.2 on both sides, and at 3 for negative advantages."""
_WITHOUT_KL = ("sft", "dapo", "asymre", "raft", "sppo", "on_policy_distill", "jsd")
"""Algorithms whose `kl_loss_fn` is `none`; that of all others is `k2`, with the coefficient 0.001."""
_OWN_LOSS = ("topr", "sppo", "rec", "raft", "mix_chord")
"""Algorithms whose aggregation is their loss's own, unless the file gives one."""
_ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3", "abs": "abs", "corrected_k3": "unbiased"}
_SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
_WORKFLOWS = ("math_workflow", "simple_workflow", "math_boxed_workflow", "async_math_workflow", "async_simple_workflow")
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
_SET_UNNEEDED = (
    "name",
    "storage_type",
    "enable_progress_bar",
    "rollout_args.logprobs",
    "max_retry_*",
    "index",
    "is_eval",
)
_M = "explorer.rollout_model"
_UNNEEDED = (
    "project", "group", "checkpoint_root_dir", "checkpoint_job_dir", "cluster", "monitor", "service", "log",
    "buffer.max_retry*", "buffer.cache*", "buffer.pad_token*", "explorer.runner*", "explorer.engine*", "explorer.max_*",
    "explorer.name", "explorer.env_vars", "explorer.concurrent_mode", "trainer.trainer_type", "trainer.ulysses*",
    "trainer.use_dynamic_bsz", "trainer.trainer_strategy", "trainer.name", "trainer.enable_preview",
    "trainer.save_strategy", "trainer.save_hf_checkpoint", "trainer.fix_actor*", "synchronizer.sync_timeout",
    "synchronizer.wait*", "synchronizer.ray_namespace", "continue_from_checkpoint", "ray_namespace",
    "ignore_validator_suggestions", "model.max_model_len", f"{_M}.engine*", f"{_M}.tensor_parallel_size",
    f"{_M}.use_v1", f"{_M}.enforce_eager", f"{_M}.enable_prefix_caching", f"{_M}.enable_chunked_prefill",
    f"{_M}.gpu_memory_utilization", f"{_M}.dtype", f"{_M}.name", f"{_M}.max_model_len", f"{_M}.max_prompt_tokens",
    f"{_M}.enable_history", f"{_M}.enable_openai_api", f"{_M}.enable_log*", f"{_M}.enable_auto_tool_choice",
    f"{_M}.tool_call_parser", f"{_M}.reasoning_parser", f"{_M}.seed",
    *(f"{at}.{name}" for at in (_T, _B) for name in _SET_UNNEEDED),
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
        run.put("taskset", _taskset(run, settings, f"{_B}.") | {"sampler": "sequential"})
        settings.take("model.max_response_tokens")
        settings.take("buffer.batch_size")
    else:
        _rollouts(run, settings, batch)
    _loss(run, settings, kind if kind in _ALGORITHMS else "grpo", name)
    _optimizer(run, settings)
    _steps(run, settings, batch, rows)
    run.finish(settings, _UNNEEDED)
    return run


def _taskset(run: ImportedRun, settings: ForeignSettings, at: str) -> dict[str, Any]:
    """Returns the section of a file; columns are named by `format`. `at` is the beginning of its keys."""
    path = hub_or_path(settings.take(f"{at}path")) or "data/train.jsonl"
    found: dict[str, Any] = {"path": path}
    if path.startswith("hf://"):
        found |= {"split": settings.take(f"{at}split", "train")}
        subset = settings.take(f"{at}subset_name")
        found |= {} if subset is None else {"subset": subset}
    columns = {"prompt_key": "prompt", "chosen_key": "response", "rejected_key": "rejected"}
    columns |= {"tools_key": "tools", "image_key": "images"}
    fields = {ours: value for key, ours in columns.items() if (value := settings.take(f"{at}format.{key}")) is not None}
    answer = settings.take(f"{at}format.response_key")
    if answer is not None:
        fields["response" if at == f"{_B}." else "answer"] = answer
    known = {("prompt", "question"), ("answer", "answer"), ("response", "chosen"), ("rejected", "rejected")}
    usual = {key: key for key in ("prompt", "answer", "response", "rejected", "tools", "images")}
    if any(value != usual[key] and (key, value) not in known for key, value in fields.items()):
        found["fields"] = fields
    system = settings.take(f"{at}format.system_prompt")
    messages = str(settings.take(f"{at}format.prompt_type", "plaintext")) == "messages"
    if at != f"{_B}." or not messages:
        found |= {"chat": True} | ({} if system is None else {"system": system})
    column = settings.take(f"{at}format.messages_key", "messages")
    if messages and column != "messages":
        run.lost[f"{at}format.messages_key"] = f"{column}: rename the column to `messages`, so that it is read"
    if not path.startswith("hf://"):
        given = {key: settings.take(f"{at}{key}") for key in ("subset_name", "split")}
        run.lose(given, at.rstrip(".") or "eval_tasksets", "a file has neither subsets nor splits", split="train")
    thinking = settings.take(f"{_M}.enable_thinking")
    return found | ({} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}})


def _rollouts(run: ImportedRun, settings: ForeignSettings, batch: int) -> None:
    run.put("taskset", _taskset(run, settings, f"{_T}."))
    order = settings.take(f"{_T}.task_selector.selector_type", "sequential")
    if order == "sequential":
        run.put("taskset.sampler", "sequential")
    elif order not in ("shuffle", "random"):
        run.lost[f"{_T}.task_selector.selector_type"] = f"{order}: see the samplers in docs/guide/curriculum.md"
    group = settings.take(f"{_T}.rollout_args.n", 1)
    size = whole(settings.take("algorithm.repeat_times", group), "algorithm.repeat_times")
    run.put("rollout.batch", batch)
    run.put("rollout.group_size", size)
    trained = whole(settings.take("buffer.train_batch_size", 0) or batch * size, "buffer.train_batch_size")
    if "buffer.batch_size" in settings and trained != batch * size:
        run.lost["buffer.train_batch_size"] = (
            f"{trained}: a step learns from all {batch * size} completions of a batch; see trainer.updates_per_batch"
        )
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_new_tokens": "max_response_tokens"}
    usual = {ours: value for ours, key in names.items() if (value := settings.take(f"model.{key}")) is not None}
    for key, value in _sampling(settings, f"{_T}.", usual).items():
        run.put(f"rollout.{key}", value)
    longest = settings.take("model.max_prompt_tokens")
    cut = settings.take("model.enable_prompt_truncation", True)
    if longest is not None:
        run.notes.append(
            f"model.max_prompt_tokens {longest}: prompts may have as many tokens as the model's context leaves"
            + (", and none is cut; drop longer ones by a filter in taskset.pipeline" if cut else "")
        )
    rest = {key: settings.take(f"model.{key}") for key in ("repetition_penalty", "min_response_tokens")}
    run.lose(rest, "model", repetition_penalty=1.0, min_response_tokens=0)
    _evaluation(run, settings, {"temperature": 1.0, "top_p": 1.0, **usual})
    workflow = settings.take(
        f"{_T}.default_workflow_type", settings.take("buffer.explorer_input.default_workflow_type")
    )
    if workflow not in (None, *_WORKFLOWS):
        run.lost["default_workflow_type"] = f"{workflow}: a workflow is a function here; docs/guide/workflows.md"
    reward = settings.take(
        f"{_T}.default_reward_fn_type", settings.take("buffer.explorer_input.default_reward_fn_type", "math_reward")
    )
    run.put("rewards", [_reward(run, reward)])
    interval = whole(settings.take("synchronizer.sync_interval", 1), "synchronizer.sync_interval")
    offset = whole(settings.take("synchronizer.sync_offset", 0), "synchronizer.sync_offset")
    style = str(settings.take("synchronizer.sync_style", "fixed"))
    if interval > 1 or offset:
        run.put("max_staleness", interval - 1 + offset)
    if style not in ("fixed", "static"):
        run.notes.append(f"synchronizer.sync_style {style}: how far rollouts may lag is max_staleness alone")
    settings.take("synchronizer.sync_method")


def _reward(run: ImportedRun, reward: str) -> dict[str, Any]:
    if reward in _REWARDS:
        return {"name": _REWARDS[reward]}
    run.lost["default_reward_fn_type"] = f"{reward}: write `def {reward}(task, completion) -> float` into rewards.py"
    return {"name": "python", "function": f"rewards.py:{reward}"}


def _sampling(settings: ForeignSettings, at: str, usual: dict[str, Any]) -> dict[str, Any]:
    """Returns the sampling of a taskset's `rollout_args`; what they leave out is as in `usual`, or left out."""
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_new_tokens"}
    found = {ours: settings.take(f"{at}rollout_args.{key}", usual.get(ours)) for key, ours in names.items()}
    top = found["top_k"]
    if top is not None and whole(top, "top_k") <= 0:
        del found["top_k"]
    return {key: value for key, value in found.items() if value is not None}


def _evaluation(run: ImportedRun, settings: ForeignSettings, usual: dict[str, Any]) -> None:
    """Sets the held-out sets. Their sampling is `usual`, that of the model, and not that of the training tasks."""
    held_out = settings.take("buffer.explorer_input.eval_tasksets") or []
    every, first = settings.take("explorer.eval_interval", 100), settings.take("explorer.eval_on_startup", True)
    workflow = settings.take("buffer.explorer_input.default_eval_workflow_type")
    if held_out and workflow not in (None, *_WORKFLOWS):
        run.lost["default_eval_workflow_type"] = f"{workflow}: a workflow is a function here; docs/guide/workflows.md"
    if held_out:
        run.put("evaluation.every", every)
        run.put("evaluation.at_start", first)
    switches = run.sections["taskset"].get("chat_template_kwargs")
    trained = {"temperature": 1.0, "top_p": 1.0, **run.sections["rollout"]}
    for place, each in enumerate(held_out):
        name, one = str(each.get("name", place)), ForeignSettings(each)
        found = _taskset(run, one, "") | {"chat": True}
        found |= {} if switches is None else {"chat_template_kwargs": switches}
        run.put(f"evaluation.sets.{name}.taskset", found)
        sampling = _sampling(one, "", usual)
        sampling |= {"top_k": 0} if "top_k" in trained and "top_k" not in sampling else {}
        greedy = sampling["temperature"] == 0
        sampling = {key: value for key, value in sampling.items() if value != trained.get(key)}
        run.put(f"evaluation.sets.{name}.sampling", None if greedy else sampling or None)
        times = one.take("rollout_args.n", 1)
        times = whole(one.take("repeat_times", times), f"eval_tasksets.{name}.repeat_times")
        run.put(f"evaluation.sets.{name}.samples", 0 if greedy else times if times != 1 else None)
        reward = one.take("default_reward_fn_type")
        run.put(f"evaluation.sets.{name}.rewards", None if reward is None else [_reward(run, reward)])
        own = one.take("default_workflow_type")
        if own not in (None, *_WORKFLOWS):
            run.lost[f"eval_tasksets.{name}.default_workflow_type"] = f"{own}: see docs/guide/workflows.md"
        run.finish(one, (*_SET_UNNEEDED, "task_selector"), f"eval_tasksets.{name}.")


def _loss(run: ImportedRun, settings: ForeignSettings, kind: str, name: str) -> None:
    """Sets the loss, its aggregation and the penalties, with Trinity's defaults for its algorithm `kind`."""
    args = "algorithm.policy_loss_fn_args"
    given = settings.section(args)
    mode = settings.take("algorithm.loss_agg_mode", given.pop("loss_agg_mode", None))
    if name == "dpo":
        _preference(run, settings, given)
        return
    both, usual = given.pop("clip_range", None), (0.2, 0.2)
    low, high = given.pop("clip_range_low", both), given.pop("clip_range_high", both)
    if kind in ("gspo", "cispo"):
        usual = (0.0003, 0.0004) if kind == "gspo" else (1.0, 0.28)
    if kind in (*_PPO_LOSS, "gspo", "cispo") or low is not None or high is not None:
        run.put("algorithm.loss.clip_low", usual[0] if low is None else low)
        run.put("algorithm.loss.clip_high", usual[1] if high is None else high)
    if kind in _PPO_LOSS:
        run.put("algorithm.loss.dual_clip", given.pop("clip_ratio_c", 3.0))
    run.lose(given, args, f"see the keys of the algorithm: rollmill explain {name}", enable_sequence_masking=False)
    if name == "sft":
        run.put("algorithm.aggregation", None if mode is None else _AGGREGATIONS.get(str(mode)))
    elif mode is not None or kind not in (*_OWN_LOSS, "on_policy_distill", "jsd"):
        run.put("algorithm.aggregation", _AGGREGATIONS.get(str(mode or "token-mean")))
    elif kind in _OWN_LOSS:
        run.notes.append(f"algorithm.aggregation: that of {name} here; Trinity's loss has its own")
    if mode is not None and str(mode) not in _AGGREGATIONS:
        run.lost["algorithm.loss_agg_mode"] = f"{mode}: see algorithm.aggregation"
    _penalty(run, settings, kind, name)
    entropy = settings.section("algorithm.entropy_loss_fn_args")
    weight = entropy.pop("entropy_coef", None)
    if settings.take("algorithm.entropy_loss_fn", "default") != "none":
        run.put("algorithm.entropy", weight if weight and name not in _OFFLINE else None)
    run.lose(entropy, "algorithm.entropy_loss_fn_args")


def _preference(run: ImportedRun, settings: ForeignSettings, given: dict[str, Any]) -> None:
    """Sets DPO's strength: that of the loss, or the coefficient of the penalty, as Trinity's examples give it."""
    penalty = settings.section("algorithm.kl_loss_fn_args")
    run.put("algorithm.beta", given.pop("beta", penalty.pop("kl_coef", None)))
    run.put("algorithm.label_smoothing", given.pop("label_smoothing", None) or None)
    settings.take("algorithm.kl_loss_fn")
    run.lose(given, "algorithm.policy_loss_fn_args")
    run.lose(penalty, "algorithm.kl_loss_fn_args", adaptive=False)


def _penalty(run: ImportedRun, settings: ForeignSettings, kind: str, name: str) -> None:
    """Sets the KL penalty: of the loss, else of the reward. There is one here."""
    usual = "none" if kind in _WITHOUT_KL else "k2"
    found: dict[str, Any] | None = None
    for part, where, default in (("kl_loss_fn", "loss", usual), ("kl_penalty_fn", "reward", "none")):
        estimator = str(settings.take(f"algorithm.{part}", default))
        args = settings.section(f"algorithm.{part}_args")
        weight = number(args.pop("kl_coef", 0.001), f"algorithm.{part}_args.kl_coef")
        adaptive, target, horizon = (args.pop(key, None) for key in ("adaptive", "target_kl", "horizon"))
        run.lose(args, f"algorithm.{part}_args")
        if estimator == "none" or not weight:
            continue
        if estimator not in _ESTIMATORS or name in (*_OFFLINE, "distill", "jsd") or found is not None:
            why = (
                "there is one penalty"
                if found is not None
                else f"estimators are {', '.join(set(_ESTIMATORS.values()))}"
            )
            run.lost[f"algorithm.{part}"] = f"{estimator}: {why}"
            continue
        found = {"coefficient": weight, "estimator": _ESTIMATORS[estimator], "where": where}
        found |= {"target": target, "horizon": horizon} if adaptive else {}
    run.put("algorithm.kl", 0.0 if found is None and name == "reinforce_plus_plus" else found)


def _optimizer(run: ImportedRun, settings: ForeignSettings) -> None:
    optim = "algorithm.optimizer"
    run.put("trainer.lr", number(settings.take(f"{optim}.lr", 1e-6), f"{optim}.lr"))
    betas = settings.take(f"{optim}.betas", [0.9, 0.999])
    run.put("trainer.betas", [number(each, f"{optim}.betas") for each in betas])
    run.put("trainer.weight_decay", settings.take(f"{optim}.weight_decay", 0.01))
    schedule = str(settings.take(f"{optim}.lr_scheduler_type", settings.take(f"{optim}.warmup_style", "constant")))
    put_schedule(run, schedule, _SCHEDULES, f"{optim}.lr_scheduler_type")
    run.lose({"optimizer_type": settings.take(f"{optim}.optimizer_type", "adam")}, optim, optimizer_type="adam")
    least = settings.take(f"{optim}.min_lr_ratio")
    run.put("trainer.min_lr_ratio", least if schedule in ("cosine", "linear") else None)
    run.put("trainer.max_grad_norm", settings.take("trainer.grad_clip", settings.take(f"{optim}.clip_grad", 1.0)))
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
    run.put("checkpoint.every", settings.take("trainer.save_interval") or None)
    run.put("checkpoint.keep_last", settings.take("trainer.max_checkpoints_to_keep"))
