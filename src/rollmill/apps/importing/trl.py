"""Imports configuration files of TRL: YAML with the arguments of `trl grpo`, `trl sft` or `trl dpo`.

Where a file leaves a key out, TRL's default (version 1.16) is written, so that the run does what TRL would do.
"""

from __future__ import annotations

from typing import Any

from rollmill.apps.importing.foreign import (
    ForeignSettings,
    ImportedRun,
    hub_or_path,
    number,
    put_schedule,
    ratio,
    whole,
)
from rollmill.errors import ConfigError

KINDS = ("grpo", "sft", "dpo")
_ONLY = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "num_iterations", "scale_rewards"),
    "sft": ("packing", "completion_only_loss", "assistant_only_loss", "dataset_text_field", "packing_strategy"),
    "dpo": ("precompute_ref_log_probs", "label_smoothing", "loss_weights", "f_divergence_type", "ld_alpha"),
}
"""Keys that only one kind of trainer has."""
_LEARNING_RATES = {"grpo": 1e-6, "sft": 2e-5, "dpo": 1e-6}
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}
_REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"name": "math"},
    "reasoning_accuracy_reward": {"name": "math"},
    "think_format_reward": {"name": "format", "pattern": r"<think>(?!.*<think>).*?</think>.*", "whole": True},
}
_UNNEEDED = (
    "output_dir", "overwrite_output_dir", "logging*", "log_*", "disable_tqdm", "num_completions_to_print", "project",
    "trackio*", "push_to_hub*", "hub_*", "dataloader*", "ddp_*", "remove_unused_columns", "use_cpu", "torch_compile*",
    "use_liger_kernel*", "liger_kernel_config", "ds3_gather_for_generation", "dataset_num_proc", "pad_to_multiple_of",
    "pad_token*", "attn_implementation", "activation_offloading", "padding_free", "do_train", "do_eval",
    "resume_from_checkpoint", "accelerator_config", "tf32", "skip_memory_metrics", "save_only_model", "save_strategy",
    "load_best_model_at_end", "gradient_checkpointing_kwargs*", "cache_implementation", "vllm_mode",
    "vllm_model_impl", "vllm_server*", "vllm_group_port", "vllm_enable_sleep_mode", "vllm_max_model_length",
    "per_device_eval_batch_size", "eval_accumulation_steps", "precompute_ref_batch_size", "precompute_ref_log_probs",
    "packing", "packing_strategy", "eval_packing", "auto_find_batch_size", "average_tokens_across_devices", "dtype",
    "torch_dtype", "ignore_bias_buffers", "bf16_full_eval", "env", "data_seed", "use_transformers_paged",
    "use_transformers_continuous_batching", "torch_empty_cache_steps", "use_cache", "compute_environment", "debug",
    "deepspeed_config", "distributed_type", "enable_cpu_affinity", "fsdp_config", "machine_rank",
    "main_training_function", "num_machines", "rdzv_backend", "same_network", "tpu_*", "deepspeed",
)  # fmt: skip


def kind_of(settings: ForeignSettings) -> str | None:
    """Returns the trainer that a file is for; None if its keys do not say so."""
    found = [kind for kind in KINDS if any(key in settings for key in _ONLY[kind])]
    return found[0] if len(found) == 1 else None


def import_trl(settings: ForeignSettings, kind: str, *, processes: int | None, rows: int | None) -> ImportedRun:
    """Makes a run of a TRL configuration.

    Args:
        kind: grpo, sft or dpo.
        processes: number of processes that TRL would train with; its batches are per device. None: `num_processes` of
            the file, as in open-r1's and accelerate's, or 1.
        rows: number of rows of the data set, to turn epochs into steps; None: unknown.

    Raises ConfigError if a value is wrong, or batches are not whole.
    """
    run = ImportedRun(f"TRL ({kind})")
    run.put("name", settings.take("run_name") or kind)
    run.put("seed", whole(settings.take("seed", 42), "seed"))
    _model(run, settings)
    _data(run, settings, kind)
    per_device = whole(settings.take("per_device_train_batch_size", 8), "per_device_train_batch_size")
    accumulated = whole(settings.take("gradient_accumulation_steps", 1), "gradient_accumulation_steps")
    given = settings.take("num_processes")
    if given is None and processes is None:
        run.notes.append("processes: 1 is a guess, and batches of TRL are per process; give --processes N")
    elif given is not None and processes not in (None, whole(given, "num_processes")):
        run.lost["num_processes"] = f"{given}: --processes {processes} is used instead"
    processes = processes or whole(given or 1, "num_processes")
    batch, updates = per_device * accumulated * processes, 1
    if kind == "grpo":
        batch, updates = _rollouts(run, settings, per_device, processes, accumulated)
        _grpo(run, settings)
        _rewards(run, settings)
    else:
        run.put("algorithm.batch", batch)
        (_sft if kind == "sft" else _dpo)(run, settings)
    _steps(run, settings, batch, updates, rows)
    _optimizer(run, settings, kind)
    run.finish(settings, _UNNEEDED)
    return run


def _model(run: ImportedRun, settings: ForeignSettings) -> None:
    name = hub_or_path(settings.take("model_name_or_path"), settings.take("model_revision"))
    if name is None:
        run.notes.append("model.path: the file names no model; give a folder or an id")
    run.put("model.path", name)
    if settings.take("trust_remote_code", False):
        run.put("model.trust_remote_code", True)
    adapters = settings.take("use_peft", False)
    rank, alpha = settings.take("lora_r", 16), settings.take("lora_alpha", 32)
    targets, dropout = settings.take("lora_target_modules"), settings.take("lora_dropout", 0.05)
    scaled = settings.take("use_rslora", False)
    if adapters:
        run.put("model.lora", {"rank": whole(rank, "lora_r"), "alpha": number(alpha, "lora_alpha")})
        run.put("model.lora.targets", [targets] if isinstance(targets, str) and targets != "all-linear" else targets)
        run.put("model.lora.rslora", True if scaled else None)
        if number(dropout, "lora_dropout"):
            run.lost["lora_dropout"] = f"adapters have no dropout here (TRL's: {dropout})"


def _data(run: ImportedRun, settings: ForeignSettings, kind: str) -> None:
    name, config = hub_or_path(settings.take("dataset_name")), settings.take("dataset_config")
    train, test = settings.take("dataset_train_split", "train"), settings.take("dataset_test_split", "test")
    if name is None:
        run.notes.append("taskset.path: the file names no dataset; give a file or an id")
        name = "data/train.jsonl"
    run.put("taskset.path", name)
    if name.startswith("hf://"):
        run.put("taskset.split", train)
        run.put("taskset.subset", config)
    else:
        run.lose({"dataset_config": config}, name, "a file has no subsets")
    if kind == "grpo" and not settings.take("shuffle_dataset", True):
        run.put("taskset.sampler", "sequential")
    settings.take("shuffle_dataset")  # the other trainers draw rows at random with and without it
    if switches := settings.section("chat_template_kwargs"):
        run.put("taskset.chat_template_kwargs", switches)
    if str(settings.take("eval_strategy", "no")) != "no":
        held_out = {"path": name} | ({"split": test} if name.startswith("hf://") else {})
        held_out |= {"subset": config} if config is not None and name.startswith("hf://") else {}
        held_out |= {"chat_template_kwargs": switches} if switches else {}
        run.put("evaluation.taskset", held_out)
    if settings.take("dataset_streaming", False):
        run.lost["dataset_streaming"] = "tasks are read into memory when a run starts"


def _rollouts(
    run: ImportedRun, settings: ForeignSettings, per_device: int, processes: int, accumulated: int
) -> tuple[int, int]:
    """Sets the batch of rollouts. Returns its tasks, and the optimizer steps that learn from it."""
    per_pass = per_device * processes
    each = f"per_device_train_batch_size {per_device} x {processes} processes (num_processes, --processes)"
    group = whole(settings.take("num_generations", 8), "num_generations")
    size, per_batch = settings.take("generation_batch_size"), settings.take("steps_per_generation")
    if per_batch is None:
        per_batch = (
            accumulated
            if size is None
            else ratio(number(size, "generation_batch_size"), per_pass, f"generation_batch_size and {each}")
        )
    per_batch = whole(per_batch, "steps_per_generation")
    completions, iterations = per_pass * per_batch, whole(settings.take("num_iterations", 1), "num_iterations")
    tasks, updates = ratio(completions, group, f"{each} x steps_per_generation {per_batch} and num_generations"), 1
    if per_batch > accumulated:
        updates = ratio(per_batch, accumulated, "steps_per_generation and gradient_accumulation_steps")
    run.put("rollout.batch", tasks)
    run.put("rollout.group_size", group)
    run.put("trainer.updates_per_batch", updates if updates > 1 else None)
    run.put("trainer.epochs_per_batch", iterations if iterations > 1 else None)
    run.put("rollout.max_new_tokens", whole(settings.take("max_completion_length", 512), "max_completion_length"))
    for key in ("temperature", "top_p", "top_k", "min_p"):
        run.put(f"rollout.{key}", settings.take(key))
    if number(settings.take("repetition_penalty", 1.0), "repetition_penalty") != 1:
        run.lost["repetition_penalty"] = "completions are sampled from the model's own distribution"
    return tasks, updates * iterations


def _grpo(run: ImportedRun, settings: ForeignSettings) -> None:
    kind, scale = str(settings.take("loss_type", "dapo")), settings.take("scale_rewards", "group")
    scale = {True: "group", False: "none", "True": "group", "False": "none"}.get(scale, scale)
    low = number(settings.take("epsilon", 0.2), "epsilon")
    high = number(settings.take("epsilon_high", low), "epsilon_high")
    sequence = settings.take("importance_sampling_level", "token") == "sequence"
    aggregation = {
        "grpo": "sequence-mean",
        "dr_grpo": "constant",
        "sapo": "sequence-mean",
        "luspo": "sequence-sum-mean",
    }
    loss: dict[str, Any] = {"name": "gspo" if sequence else "ppo_clip", "clip_low": low, "clip_high": high}
    dual = settings.take("delta")
    if not sequence and dual is not None:
        loss["dual_clip"] = number(dual, "delta")
    elif dual is not None:
        run.lost["delta"] = "the loss `gspo` has no second bound"
    run.put("algorithm.name", kind if kind in ("cispo", "sapo", "vespo") else "grpo")
    run.put("algorithm.advantage", {"name": "grpo", "scale": scale})
    if kind == "cispo":
        loss = {"name": "cispo", "clip_low": 1.0, "clip_high": high - 1}
    elif kind == "sapo":
        positive, negative = settings.take("sapo_temperature_pos", 1.0), settings.take("sapo_temperature_neg", 1.05)
        loss = {"name": "sapo", "tau_positive": positive, "tau_negative": negative}
    elif kind == "vespo":
        loss = {"name": "vespo"}
        for part in ("k", "lambda"):
            for sign, short in (("positive", "pos"), ("negative", "neg")):
                value = settings.take(f"vespo_{part}_{short}")
                loss |= {} if value is None else {f"{part}_{sign}": value}
    run.put("algorithm.loss", loss)
    run.put("algorithm.aggregation", aggregation.get(kind, "token-mean"))
    if kind == "bnpo":
        run.notes.append("loss_type bnpo: the denominator is that of the whole batch, not of each local one")
    beta = number(settings.take("beta", 0.0), "beta")
    unbiased = settings.take("use_bias_correction_kl", True)
    if beta:
        run.put("algorithm.kl", {"coefficient": beta, "estimator": "unbiased" if unbiased else "k3"})
        if settings.take("sync_ref_model", False):
            run.lost["sync_ref_model"] = "the reference is replaced by kl.refresh_every, not mixed"
    run.put("algorithm.entropy", settings.take("entropy_coef", 0.0) or None)
    top = number(settings.take("top_entropy_quantile", 1.0), "top_entropy_quantile")
    if top < 1:
        run.put("algorithm.masks", [{"name": "high_entropy", "top": top}])
    if settings.take("mask_truncated_completions", False):
        run.put("pipeline", [{"name": "truncated", "then": "mask"}])
    _corrections(run, settings)


def _corrections(run: ImportedRun, settings: ForeignSettings) -> None:
    found: list[dict[str, Any]] = []
    threshold = settings.take("off_policy_mask_threshold")
    if threshold is not None:
        found.append({"name": "off_policy_mask", "delta": number(threshold, "off_policy_mask_threshold")})
    mode = settings.take("vllm_importance_sampling_mode", "sequence_mask")
    cap = settings.take("vllm_importance_sampling_clip_max", settings.take("vllm_importance_sampling_cap", 3.0))
    low = settings.take("vllm_importance_sampling_clip_min", 0.0)
    corrected = settings.take("vllm_importance_sampling_correction", True)
    memory, parallel = settings.take("vllm_gpu_memory_utilization"), settings.take("vllm_tensor_parallel_size", 1)
    if settings.take("use_vllm", False):
        run.put("engine", "vllm")
        if corrected:
            names = {"token_truncate": "tis", "token_mask": "mis", "sequence_truncate": "sequence_tis"}
            name = names.get(mode, "sequence_mis")
            bounds = {"cap": cap} if name.endswith("tis") else {"low": low, "high": cap}
            found.append({"name": name, **bounds})
        if memory is not None:
            run.lost["vllm_gpu_memory_utilization"] = "engine.cache_gb gives vLLM's memory for keys and values in GB"
        if whole(parallel, "vllm_tensor_parallel_size") > 1:
            run.lost["vllm_tensor_parallel_size"] = "see the section `engine` of vLLM"
    run.put("algorithm.corrections", found or None)


def _rewards(run: ImportedRun, settings: ForeignSettings) -> None:
    names, weights = settings.take("reward_funcs") or [], settings.take("reward_weights") or []
    model = settings.take("reward_model_name_or_path")
    rewards: list[dict[str, Any]] = [] if model is None else [{"name": "model", "path": hub_or_path(model)}]
    names = [names] if isinstance(names, str) else names
    if weights and len(weights) != len(rewards) + len(names):
        raise ConfigError(f"reward_weights: {len(weights)} weights for {len(rewards) + len(names)} rewards")
    weights = [number(each, "reward_weights") for each in weights] or [None] * (len(rewards) + len(names))
    for reward, weight in zip(rewards, weights, strict=False):
        reward |= {} if weight is None else {"weight": weight}
    for name, weight in zip(names, weights[len(rewards) :], strict=True):
        own = {} if weight is None else {"weight": weight}
        short = str(name).rpartition(".")[2]
        if short == "get_soft_overlong_punishment":
            run.notes.append("get_soft_overlong_punishment: set algorithm.overlong_buffer to its number of tokens")
        elif short in _REWARDS:
            rewards.append(_REWARDS[short] | own)
        else:
            rewards.append({"name": "python", "function": f"rewards.py:{short}", **own})
            run.lost[f"reward_funcs: {name}"] = (
                f"copy `{short}` into rewards.py, unchanged (it is called for each completion; with the attribute "
                "`group = True` once for all completions of a task)"
            )
    if not rewards:
        rewards.append({"name": "python", "function": "rewards.py:reward"})
        run.notes.append("rewards: the file names none; write rewards.py, or choose built-in ones")
    run.put("rewards", rewards)


def _sft(run: ImportedRun, settings: ForeignSettings) -> None:
    run.put("algorithm.name", "sft_is" if settings.take("loss_type", "nll") == "dft" else "sft")
    length, rest = settings.take("max_length", 1024), settings.take("truncation_mode", "keep_start")
    run.notes.append(
        f"max_length {length} ({rest}): longer rows are left out or refused, not cut; they must fit the model's context"
    )
    assistant, only = settings.take("assistant_only_loss", False), settings.take("completion_only_loss")
    if only is False:
        run.lost["completion_only_loss"] = "only completions are imitated, never prompts"
    run.notes.append(
        "rows with `messages`: the last message of the assistant is imitated"
        + ("" if assistant else "; TRL would learn from the prompts, too")
    )
    if "dataset_text_field" in settings:
        run.lost["dataset_text_field"] = "text without a prompt is not read; give prompt and completion"
        settings.take("dataset_text_field")


def _dpo(run: ImportedRun, settings: ForeignSettings) -> None:
    losses, weights = settings.take("loss_type", ["sigmoid"]), settings.take("loss_weights")
    losses = [losses] if isinstance(losses, str) else list(losses)
    weighted = dict(zip(losses, [number(each, "loss_weights") for each in weights or [1.0] * len(losses)], strict=True))
    run.put("algorithm.name", "dpo")
    run.put("algorithm.beta", number(settings.take("beta", 0.1), "beta"))
    if settings.take("label_smoothing", 0.0):
        run.lost["label_smoothing"] = "TRL's losses sigmoid and ipo do not use it; algorithm.label_smoothing is cDPO's"
    main = [name for name in weighted if name in ("sigmoid", "ipo", "sigmoid_norm")]
    run.put("algorithm.loss", "ipo" if "ipo" in main else None)
    run.put("algorithm.normalise", True if main[:1] in (["sigmoid_norm"], ["ipo"]) else None)
    scale = weighted.get(main[0], 1.0) if main else 1.0
    if "sft" in weighted:
        run.put("algorithm.sft", weighted["sft"] / scale)
        run.notes.append("loss_type sft: the mean over a completion's tokens here, over all of the batch's in TRL")
    if scale != 1:
        run.notes.append(f"loss_weights: the preference loss has weight 1 here, so gradients are {1 / scale:g} times")
    for name in weighted.keys() - {"sft", *main[:1]}:
        run.lost[f"loss_type: {name}"] = "of DPO's losses sigmoid, sigmoid_norm, ipo and sft have a counterpart"
    if settings.take("f_divergence_type", "reverse_kl") != "reverse_kl":
        run.lost["f_divergence_type"] = "the divergence is the reverse KL"
    length, rest = settings.take("max_length", 1024), settings.take("truncation_mode", "keep_start")
    run.notes.append(f"max_length {length} ({rest}): longer rows are left out or refused, not cut")
    settings.take("disable_dropout")


def _steps(run: ImportedRun, settings: ForeignSettings, batch: int, updates: int, rows: int | None) -> None:
    """Sets what TRL counts in optimizer steps, and is counted in batches here."""
    most, epochs = whole(settings.take("max_steps", -1), "max_steps"), settings.take("num_train_epochs", 3.0)
    if most > 0:
        steps = max(1, round(most / updates))
        run.put("steps", steps)
    elif rows is not None:
        steps = max(1, int(number(epochs, "num_train_epochs") * rows // batch))
        run.put("steps", steps)
    else:
        steps = 100
        run.put("steps", steps)
        run.notes.append(
            f"steps: {steps} is a guess for num_train_epochs {epochs}: steps = epochs x rows / {batch}; import with "
            "--rows N, or correct it"
        )
    warmup, share = number(settings.take("warmup_steps", 0), "warmup_steps"), settings.take("warmup_ratio", 0.0)
    early = round((warmup if warmup >= 1 else warmup * steps * updates) / updates) or round(
        number(share, "warmup_ratio") * steps
    )
    run.put("trainer.warmup_steps", early or None)
    if early:
        run.notes.append("warm-up: the first step has the rate lr / warmup_steps here, and 0 in TRL")
    every, kind = settings.take("eval_steps"), str(settings.take("save_steps", 500))
    if "evaluation" in run.sections:
        run.put("evaluation.every", max(1, round(number(every, "eval_steps") / updates)) if every else None)
        run.put("evaluation.at_start", bool(settings.take("eval_on_start", False)))
    saved = float(kind)
    run.put("checkpoint.every", max(1, round((saved if saved >= 1 else saved * steps * updates) / updates)))
    run.put("checkpoint.keep_last", settings.take("save_total_limit"))
    if settings.take("report_to") not in (None, "none", [], ["none"]):
        wanted = settings.take("report_to")
        if "tensorboard" in str(wanted):
            run.put("monitor.trackers", ["tensorboard"])
        if str(wanted) not in ("tensorboard", "['tensorboard']"):
            run.lost["report_to"] = (
                f"{wanted}: RUN/report.html and `rollmill show` need no account; or a @rollmill.tracker"
            )


def _optimizer(run: ImportedRun, settings: ForeignSettings, kind: str) -> None:
    run.put("trainer.lr", number(settings.take("learning_rate", _LEARNING_RATES[kind]), "learning_rate"))
    schedule = str(settings.take("lr_scheduler_type", "linear"))
    least = settings.section("lr_scheduler_kwargs")
    if put_schedule(run, schedule, _SCHEDULES, "lr_scheduler_type") == "cosine" and "min_lr_rate" in least:
        run.put("trainer.min_lr_ratio", number(least.pop("min_lr_rate"), "lr_scheduler_kwargs.min_lr_rate"))
    run.lose(least, "lr_scheduler_kwargs")
    optimizer = str(settings.take("optim", "adamw_torch"))
    if optimizer in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"):
        run.put("trainer.optimizer", "adamw_8bit")
    elif not optimizer.startswith(("adamw", "paged_adamw")):
        run.lost["optim"] = f"{optimizer}: the optimizer is AdamW, with moments in 32 or 8 bits"
    first, second = settings.take("adam_beta1", 0.9), settings.take("adam_beta2", 0.999)
    run.put("trainer.betas", [number(first, "adam_beta1"), number(second, "adam_beta2")])
    run.put("trainer.eps", number(settings.take("adam_epsilon", 1e-8), "adam_epsilon"))
    run.put("trainer.weight_decay", number(settings.take("weight_decay", 0.0), "weight_decay") or None)
    run.put("trainer.max_grad_norm", number(settings.take("max_grad_norm", 1.0), "max_grad_norm") or 1e9)
    run.put("trainer.gradient_checkpointing", bool(settings.take("gradient_checkpointing", True)))
    half, full = settings.take("bf16"), settings.take("fp16", False)
    if full:
        run.lost["fp16"] = "computes in fp32 or bf16; see trainer.precision"
    elif half is not None:
        run.put("trainer.precision", "bf16" if half else "fp32")
