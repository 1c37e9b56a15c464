"""Imports verl's configuration: the Hydra YAML of `main_ppo` (0.8), whole, or the overrides that Hydra stores."""

from __future__ import annotations

from typing import Any

from rollmill.apps.importing.foreign import (
    ForeignSettings,
    ImportedRun,
    hub_or_path,
    number,
    put_schedule,
    put_steps,
    ratio,
    whole,
)

_ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "grpo_passk": "pass_at_k",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "optimal_token_baseline": "otb",
}
_LOSSES = {
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}
_AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
    "seq-mean-token-sum": "sequence-sum-mean",
    "seq-mean-token-sum-norm": "constant",
}
_PENALTIES = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_SCHEDULES = {"constant": "constant", "cosine": "cosine"}
_CLIPPED = ("gspo", "geo_mean", "cispo")
"""Losses whose bounds are those of the policy loss."""
_CRITIC = {
    "betas": [0.9, 0.999],
    "weight_decay": 0.01,
    "lr_warmup_steps": -1,
    "lr_warmup_steps_ratio": 0.0,
    "lr_scheduler_type": "constant",
    "warmup_style": "constant",
}
"""Settings of the critic's optimizer, with verl's defaults."""
_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_UNNEEDED = (
    "ray_kwargs", "ray_init", "global_profiler", "transfer_queue", "trainer.logger", "trainer.project_name",
    "trainer.default_*", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.balance_batch", "trainer.device",
    "trainer.ray_wait*", "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.resume_*",
    "trainer.validation_data_dir", "trainer.max_actor_ckpt*", "trainer.max_critic_ckpt*", "trainer.del_local*",
    "trainer.use_legacy_worker_impl", "actor_rollout_ref.nccl_timeout*", "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.ref", f"{_A}.strategy", f"{_A}.fsdp_config", f"{_A}.megatron*", f"{_A}.ulysses*",
    f"{_A}.use_torch_compile", f"{_A}.checkpoint", f"{_A}.profiler", f"{_A}.use_remove_padding", f"{_A}.shuffle",
    f"{_A}.data_loader_seed", f"{_A}.use_fused_kernels", f"{_A}.ppo_micro_batch_size*", f"{_A}.use_dynamic_bsz",
    f"{_A}.ppo_infer*", f"{_A}.entropy_checkpointing", f"{_A}.entropy_from_logits*",
    f"{_R}.tensor_model_parallel_size", f"{_R}.gpu_memory_utilization", f"{_R}.enforce_eager", f"{_R}.log_prob*",
    f"{_R}.free_cache_engine", f"{_R}.load_format", f"{_R}.dtype", f"{_R}.layered_summon*",
    f"{_R}.max_num_batched_tokens", f"{_R}.enable_chunked_prefill", f"{_R}.disable_log_stats*", f"{_R}.max_model_len",
    f"{_R}.update_weights*", f"{_R}.calculate_log_probs", f"{_R}.mode", f"{_R}.profiler", f"{_R}.prompt_length",
    f"{_R}.response_length", f"{_R}.enable_prefix_caching", f"{_R}.data_parallel_size",
    f"{_R}.pipeline_model_parallel_size*", f"{_R}.expert_parallel_size", f"{_R}.trace*", f"{_R}.skip*",
    "actor_rollout_ref.model.use_remove_padding", "actor_rollout_ref.model.use_shm", "critic.strategy",
    "actor_rollout_ref.model.external_lib", "actor_rollout_ref.model.use_fused_kernels",
    "actor_rollout_ref.model.fused_kernel_options", "critic.ppo_micro*", "critic.forward*", "critic.use_dynamic*",
    "critic.ppo_max*", "critic.fsdp*", "critic.checkpoint", "critic.profiler", "critic.ulysses*", "critic.megatron*",
    "data.return_*", "data.filter_overlong*", "data.dataloader_num_workers*", "data.video_key", "data.use_shm*",
    "data.cache*", "data.val_batch_size", "data.filter_overlong_prompts_workers", "data.reward_fn_key",
    "data.validation_shuffle", "_target_", "data.tokenizer",
)  # fmt: skip


def import_verl(settings: ForeignSettings, *, rows: int | None) -> ImportedRun:
    """Makes a run of a verl configuration; see `import_trl` for `rows`.

    Raises ConfigError if a value is wrong, or batches are not whole.
    """
    run = ImportedRun("verl")
    run.put("name", settings.take("trainer.experiment_name", "verl"))
    run.put("seed", settings.take("data.seed"))
    _model(run, settings)
    _data(run, settings)
    batch = _rollout(run, settings)
    _algorithm(run, settings)
    _rewards(run, settings)
    _optimizer(run, settings)
    _steps(run, settings, batch, rows)
    run.finish(settings, _UNNEEDED)
    return run


def _model(run: ImportedRun, settings: ForeignSettings) -> None:
    name = "actor_rollout_ref.model"
    path = hub_or_path(settings.take(f"{name}.path"))
    if path is None:
        run.notes.append("model.path: the file names no model; give a folder or an id")
    run.put("model.path", path)
    if settings.take(f"{name}.trust_remote_code", False):
        run.put("model.trust_remote_code", True)
    run.put("trainer.gradient_checkpointing", settings.take(f"{name}.enable_gradient_checkpointing"))
    rank, alpha = settings.take(f"{name}.lora_rank", 0), settings.take(f"{name}.lora_alpha", 16)
    targets = settings.take(f"{name}.target_modules", "all-linear")
    if whole(rank, "lora_rank"):
        targets = targets if targets == "all-linear" or isinstance(targets, list) else [targets]
        run.put("model.lora", {"rank": rank, "alpha": alpha, "targets": targets})


def _data(run: ImportedRun, settings: ForeignSettings) -> None:
    train, held_out = settings.take("data.train_files"), settings.take("data.val_files")
    fields: dict[str, str] = {}
    for key, ours, usual in (("prompt_key", "prompt", "prompt"), ("image_key", "images", "images")):
        column = settings.take(f"data.{key}", usual)
        fields |= {} if column == usual else {ours: column}
    switches = settings.section("data.apply_chat_template_kwargs")
    common = ({"fields": fields} if fields else {}) | ({"chat_template_kwargs": switches} if switches else {})
    for section, files in (("taskset", train), ("evaluation.taskset", held_out)):
        listed = files if isinstance(files, list) else [] if files is None else [files]
        sets = [{"path": str(each), **common} for each in listed]
        if len(sets) > 1:
            run.put(section, {"mix": [{"name": f"set{n}", **each} for n, each in enumerate(sets)]})
        elif sets:
            run.put(section, sets[0])
    if train is None:
        run.notes.append("taskset.path: the file names no training files; give one")
        run.put("taskset.path", "data/train.parquet")
    if not settings.take("data.shuffle", True):
        entries = run.sections["taskset"].get("mix", [run.sections["taskset"]])
        for entry in entries:
            entry["sampler"] = "sequential"
        if len(entries) > 1:
            run.notes.append("data.shuffle false: each file keeps its order, and the files take turns by weight")
    longest = settings.take("data.max_prompt_length")
    if longest is not None:
        run.notes.append(
            f"data.max_prompt_length {longest}: prompts may have as many tokens as the model's context leaves; drop "
            "longer ones by a filter in taskset.pipeline"
        )


def _rollout(run: ImportedRun, settings: ForeignSettings) -> int:
    tasks = whole(settings.take("data.train_batch_size", 1024), "data.train_batch_size")
    mini = whole(settings.take(f"{_A}.ppo_mini_batch_size", 256), "ppo_mini_batch_size")
    run.put("rollout.batch", tasks)
    run.put("rollout.group_size", whole(settings.take(f"{_R}.n", 1), f"{_R}.n"))
    run.put("rollout.max_new_tokens", whole(settings.take("data.max_response_length", 512), "max_response_length"))
    updates = ratio(tasks, min(mini, tasks), "data.train_batch_size and ppo_mini_batch_size")
    run.put("trainer.updates_per_batch", updates if updates > 1 else None)
    run.put("trainer.epochs_per_batch", settings.take(f"{_A}.ppo_epochs"))
    run.put("rollout.temperature", settings.take(f"{_R}.temperature"))
    run.put("rollout.top_p", settings.take(f"{_R}.top_p"))
    top = settings.take(f"{_R}.top_k", -1)
    run.put("rollout.top_k", top if whole(top, "top_k") > 0 else None)
    run.put("rollout.max_sequences", settings.take(f"{_R}.max_num_seqs"))
    if settings.take(f"{_R}.ignore_eos", False):
        run.lost[f"{_R}.ignore_eos"] = "a completion ends with the end token"
    engine = settings.section(f"{_R}.engine_kwargs")
    run.lose({key: value for key, value in engine.items() if value is not False}, f"{_R}.engine_kwargs")
    if settings.take(f"{_R}.do_sample", True) is False:
        run.lost[f"{_R}.do_sample"] = "rollouts are sampled; a group of greedy ones has no differences to learn from"
    if settings.take(f"{_R}.name") == "vllm":
        run.put("engine", "vllm")
    elif settings.take(f"{_R}.name") is not None:
        run.lost[f"{_R}.name"] = f"{settings.take(f'{_R}.name')}: the engines are native and vllm"
    if "evaluation" in run.sections:
        values = settings.section(f"{_R}.val_kwargs")
        top = values.pop("top_k", None)
        sampling = {key: values[key] for key in ("temperature", "top_p") if values.get(key) is not None}
        sampling |= {"top_k": top} if isinstance(top, int) and top > 0 else {}
        greedy = values.get("temperature", 0) == 0 or values.get("do_sample") is False
        run.put("evaluation.sampling", None if greedy else sampling or None)
        run.put("evaluation.samples", 0 if greedy else values.get("n"))
        rest = {key: each for key, each in values.items() if key not in ("temperature", "top_p", "do_sample", "n")}
        run.lose(rest, f"{_R}.val_kwargs")
    if settings.take(f"{_R}.multi_turn.enable", False):
        run.lost[f"{_R}.multi_turn"] = (
            "a workflow rolls out several turns, with the section tools: docs/guide/workflows.md"
        )
    settings.section(f"{_R}.multi_turn")
    agent = settings.section(f"{_R}.agent")
    agent.pop("num_workers", None)
    run.lose(
        agent,
        f"{_R}.agent",
        "a workflow is a function here; docs/guide/workflows.md",
        default_agent_loop="single_turn_agent",
    )
    return tasks


def _algorithm(run: ImportedRun, settings: ForeignSettings) -> None:
    estimator = str(settings.take("algorithm.adv_estimator", "gae"))
    if estimator not in _ESTIMATORS:
        run.lost["algorithm.adv_estimator"] = f"{estimator}: see `rollmill algorithms`"
    name = _ESTIMATORS.get(estimator, "grpo")
    run.put("algorithm.name", name)
    normalised = settings.take("algorithm.norm_adv_by_std_in_grpo", True)
    if name == "grpo":
        run.put("algorithm.advantage", {"name": "grpo", "scale": "group" if normalised else "none"})
    warmup = settings.take("trainer.critic_warmup") or None
    gamma, lam = settings.take("algorithm.gamma", 1.0), settings.take("algorithm.lam", 1.0)
    if name == "ppo":
        run.put("algorithm.advantage", {"name": "gae", "gamma": gamma, "lam": lam, "critic_lam": lam})
        run.put("algorithm.critic.lr", settings.take("critic.optim.lr"))
        run.put("algorithm.critic.value_clip", settings.take("critic.cliprange_value"))
        run.put("algorithm.critic.warmup_steps", warmup)
    mode = str(settings.take(f"{_A}.policy_loss.loss_mode", "vanilla"))
    both = settings.take(f"{_A}.clip_ratio", 0.2)
    low, high = settings.take(f"{_A}.clip_ratio_low", both), settings.take(f"{_A}.clip_ratio_high", both)
    if mode == "vanilla":
        dual = settings.take(f"{_A}.clip_ratio_c", 3.0)
        loss = {"name": "ppo_clip", "clip_low": low, "clip_high": high, "dual_clip": dual}
        run.put("algorithm.loss", loss)
    elif mode in _LOSSES:
        run.put(
            "algorithm.loss",
            {"name": _LOSSES[mode]} | ({"clip_low": low, "clip_high": high} if mode in _CLIPPED else {}),
        )
        if mode in ("clip_cov", "kl_cov"):
            run.sections["algorithm"].pop("loss")
            run.put("algorithm.name", mode)
    else:
        run.lost[f"{_A}.policy_loss.loss_mode"] = f"{mode}: see `rollmill algorithms`"
    if mode not in ("vanilla", *_CLIPPED) and (low, high) != (0.2, 0.2):
        run.lost[f"{_A}.clip_ratio"] = (
            f"loss_mode {mode} has other bounds: rollmill explain {run.sections['algorithm']['name']}"
        )
    for key, value in (("gamma", gamma), ("lam", lam)):
        if name != "ppo" and value != 1:
            run.lost[f"algorithm.{key}"] = f"only `gae` discounts (its value: {value})"
    if name not in ("ppo", "grpo") and not normalised:
        run.lost["algorithm.norm_adv_by_std_in_grpo"] = f"see the advantage of {name}: rollmill explain {name}"
    run.put("algorithm.aggregation", _AGGREGATIONS.get(str(settings.take(f"{_A}.loss_agg_mode", "token-mean"))))
    run.put("algorithm.entropy", settings.take(f"{_A}.entropy_coeff", 0) or None)
    _penalty(run, settings)
    if settings.take("algorithm.filter_groups.enable", False):
        run.put("algorithm.drop_uniform_groups", True)
        run.notes.append("algorithm.filter_groups: equal groups leave the loss; a filter in `pipeline` replaces them")
        filtered = settings.section("algorithm.filter_groups")
        filtered.pop("enable", None)
        run.lose(filtered, "algorithm.filter_groups", metric="acc")
    settings.section("algorithm.filter_groups")


def _penalty(run: ImportedRun, settings: ForeignSettings) -> None:
    weight, kind = settings.take(f"{_A}.kl_loss_coef", 0.001), settings.take(f"{_A}.kl_loss_type", "low_var_kl")
    reward, estimator = settings.section("algorithm.kl_ctrl"), settings.take("algorithm.kl_penalty", "kl")
    if settings.take(f"{_A}.use_kl_loss", False):
        found = _PENALTIES.get(str(kind).removesuffix("+"), "k3")
        if str(kind).removesuffix("+") not in _PENALTIES:
            run.lost[f"{_A}.kl_loss_type"] = f"{kind}: estimators are k1, k2, k3, abs and unbiased"
        run.put("algorithm.kl", {"coefficient": weight, "estimator": found, "where": "loss"})
        if str(kind).endswith("+"):
            run.notes.append(f"kl_loss_type {kind}: the estimator {found} has its own gradient; k2's is that of the KL")
    elif settings.take("algorithm.use_kl_in_reward", False):
        found = _PENALTIES.get(str(estimator), "k1")
        if str(estimator) not in _PENALTIES:
            run.lost["algorithm.kl_penalty"] = f"{estimator}: estimators are k1, k2, k3, abs and unbiased"
        penalty = {"coefficient": reward.get("kl_coef", 0.001), "estimator": found, "where": "reward"}
        if reward.get("type") == "adaptive":
            penalty |= {"target": reward.get("target_kl", 0.1), "horizon": reward.get("horizon", 10000)}
        run.put("algorithm.kl", penalty)
    elif run.sections["algorithm"]["name"] == "reinforce_plus_plus":
        run.put("algorithm.kl", 0.0)
    if settings.take(f"{_A}.use_kl_loss", False) and settings.take("algorithm.use_kl_in_reward", False):
        run.lost["algorithm.use_kl_in_reward"] = "the penalty is in the loss already, and there is one"


def _rewards(run: ImportedRun, settings: ForeignSettings) -> None:
    own, name = (
        settings.take("custom_reward_function.path"),
        settings.take("custom_reward_function.name", "compute_score"),
    )
    options = settings.section("custom_reward_function.reward_kwargs")
    run.lose(options if own is None else {}, "custom_reward_function.reward_kwargs")
    settings.section("custom_reward_function")
    overlong = settings.section("reward_model.reward_kwargs.overlong_buffer_cfg") or settings.section(
        "reward_model.overlong_buffer"
    )
    manager = settings.take("reward_model.reward_manager", settings.take("reward_manager.name", "naive"))
    sandbox = settings.section("reward_model.sandbox_fusion")
    if sandbox.get("url") is not None:
        run.lost["reward_model.sandbox_fusion"] = "code runs in a sandbox of this machine: docs/guide/sandbox.md"
    rest = settings.section("reward_model.reward_kwargs")
    rest = {key: value for key, value in rest.items() if not key.startswith("overlong_buffer_cfg.")}
    run.lose(rest, "reward_model.reward_kwargs")
    if overlong.get("enable"):
        run.put("algorithm.overlong_buffer", overlong.get("len"))
        if overlong.get("penalty_factor", 1.0) != 1.0:
            run.lost["overlong_buffer.penalty_factor"] = "the penalty rises to 1"
    if manager not in ("naive", "dapo", "batch", "prime"):
        run.lost["reward_model.reward_manager"] = f"{manager}: rewards are summed by weight; docs/guide/rewards.md"
    if settings.take("reward_model.enable", False):
        run.put("rewards", [{"name": "model", "path": hub_or_path(settings.take("reward_model.model.path"))}])
    elif own is not None:
        reward = {"name": "python", "function": f"{own}:{name}"}
        run.put("rewards", [reward | ({"options": options} if options else {})])
    else:
        run.put("rewards", [{"name": "math"}])
        run.notes.append("rewards: verl chooses by data_source; `math` compares the final answer with ground_truth")
    settings.section("reward_model")
    settings.section("reward_manager")


def _optimizer(run: ImportedRun, settings: ForeignSettings) -> None:
    optim = f"{_A}.optim"
    run.put("trainer.lr", number(settings.take(f"{optim}.lr", 1e-6), f"{optim}.lr"))
    run.put("trainer.max_grad_norm", settings.take(f"{_A}.grad_clip", settings.take(f"{optim}.clip_grad", 1.0)))
    run.put("trainer.weight_decay", settings.take(f"{optim}.weight_decay", 0.01))
    betas = settings.take(f"{optim}.betas", [0.9, 0.999])
    run.put("trainer.betas", [number(each, f"{optim}.betas") for each in betas])
    schedule = str(settings.take(f"{optim}.lr_scheduler_type", settings.take(f"{optim}.warmup_style", "constant")))
    put_schedule(run, schedule, _SCHEDULES, f"{optim}.lr_scheduler_type")
    least = settings.take(f"{optim}.min_lr_ratio")
    run.put("trainer.min_lr_ratio", least if schedule == "cosine" else None)
    tokens = settings.take(f"{_A}.ppo_max_token_len_per_gpu")
    if settings.take(f"{_A}.use_dynamic_bsz", False):
        run.put("trainer.micro_batch_tokens", tokens)
    critic = settings.section("critic.optim")
    path = settings.take("critic.model.path")
    settings.section("critic.model")
    if run.sections["algorithm"]["name"] == "ppo":
        own = {key: value for key, value in critic.items() if key in _CRITIC and value != _CRITIC[key]}
        run.lose(own, "critic.optim", "the critic has the policy's optimizer, but for its lr")
        if path is not None and hub_or_path(path) != run.sections["model"].get("path"):
            run.lost["critic.model.path"] = f"the critic starts from the policy's weights (its value: {path})"


def _steps(run: ImportedRun, settings: ForeignSettings, batch: int, rows: int | None) -> None:
    most, epochs = settings.take("trainer.total_training_steps"), settings.take("trainer.total_epochs", 30)
    settings.take(f"{_A}.optim.total_training_steps")
    keys = "trainer.total_training_steps", "trainer.total_epochs"
    given = most if most is not None and whole(most, keys[0]) > 0 else None
    steps = put_steps(run, given, epochs, rows, batch, keys)
    early, share = (
        settings.take(f"{_A}.optim.lr_warmup_steps", -1),
        settings.take(f"{_A}.optim.lr_warmup_steps_ratio", 0.0),
    )
    warmup = (
        int(early) if early is not None and int(early) > 0 else round(number(share, "lr_warmup_steps_ratio") * steps)
    )
    run.put("trainer.warmup_steps", warmup or None)
    saved, tested = int(settings.take("trainer.save_freq", -1)), int(settings.take("trainer.test_freq", -1))
    run.put("checkpoint.every", saved if saved > 0 else None)
    before: Any = settings.take("trainer.val_before_train", True)
    if "evaluation" in run.sections:
        run.put("evaluation.every", tested if tested > 0 else steps)
        run.put("evaluation.at_start", bool(before))
