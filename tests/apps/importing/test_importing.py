"""`rollmill import-config`: files in the layouts of TRL, verl and Trinity-RFT become run files that load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollmill.apps.importing.conversion import import_file, to_run_file
from rollmill.cli import main
from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.validation_errors import FORMER_NAMES
from rollmill.errors import ConfigError

GRPO = """\
model_name_or_path: Qwen/Qwen3-0.6B
model_revision: main
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward, think_format_reward, my_rewards.brevity]
reward_weights: [1.0, 0.5, 0.1]
use_peft: true
lora_r: 32
output_dir: out
learning_rate: 1e-5
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 4
num_generations: 8
max_completion_length: 256
max_steps: 200
warmup_ratio: 0.1
beta: 0.04
epsilon_high: 0.28
loss_type: dapo
mask_truncated_completions: true
top_entropy_quantile: 0.2
eval_strategy: steps
eval_steps: 50
save_steps: 100
bf16: true
report_to: wandb
repetition_penalty: 1.1
"""
VERL = """\
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, use_kl_in_reward: false}
data:
  train_files: data/gsm8k/train.parquet
  val_files: data/gsm8k/test.parquet
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, use_remove_padding: true, enable_gradient_checkpointing: true}
  actor:
    optim: {lr: 1e-6, lr_warmup_steps_ratio: 0.1, weight_decay: 0.01}
    ppo_mini_batch_size: 256
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 24000
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    loss_agg_mode: token-mean
    fsdp_config: {param_offload: false}
    calculate_entropy: true
  rollout:
    name: vllm
    tensor_model_parallel_size: 2
    temperature: 0.9
    n: 5
    max_model_len: ${data.max_response_length}
    val_kwargs: {temperature: 0.6, n: 2}
trainer:
  experiment_name: qwen3_8b
  total_epochs: 15
  save_freq: 20
  test_freq: 5
  n_gpus_per_node: 8
  logger: [console, wandb]
"""
TRINITY = """\
project: mine
name: ${oc.env:TRINITY_NAME,gsm8k-grpo}
mode: both
checkpoint_root_dir: ./checkpoints
algorithm:
  algorithm_type: grpo
  repeat_times: 8
  optimizer: {lr: 1.0e-5, lr_warmup_steps_ratio: 0.05, warmup_style: cosine, min_lr_ratio: 0.1}
  policy_loss_fn_args: {clip_range: 0.2}
  kl_loss_fn: k2
  kl_loss_fn_args: {kl_coef: 0.001}
model: {model_path: Qwen/Qwen2.5-1.5B-Instruct, max_prompt_tokens: 256, max_response_tokens: 1024}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  total_epochs: 2
  batch_size: 96
  explorer_input:
    taskset:
      name: gsm8k
      storage_type: file
      path: openai/gsm8k
      subset_name: main
      split: train
      format: {prompt_key: question, response_key: answer}
      rollout_args: {temperature: 0.8}
    default_workflow_type: math_workflow
    eval_tasksets:
      - {name: test, path: openai/gsm8k, subset_name: main, split: test, format: {prompt_key: question}}
explorer: {eval_interval: 50, runner_num: 32}
synchronizer: {sync_method: nccl, sync_interval: 2, sync_timeout: 1200}
trainer: {trainer_type: verl, save_interval: 100, grad_clip: 0.5}
"""


def imported(tmp_path: Path, text: str, name: str = "theirs.yaml", **options: Any) -> tuple[LoadedRun, Any]:
    """The run of an imported file, which has to load, and what was found."""
    source = tmp_path / name
    source.write_text(text)
    found = import_file(source, **options)
    path = tmp_path / "run.yaml"
    path.write_text(to_run_file(found, source))
    return load_run(path, require_files=False), found


def test_grpo_of_trl(tmp_path: Path) -> None:
    run, found = imported(tmp_path, GRPO, processes=2)
    [stage] = run.stages
    raw = found.sections
    assert raw["model"] == {"path": "hf://Qwen/Qwen3-0.6B", "lora": {"rank": 32, "alpha": 32.0}}
    assert raw["taskset"] == {"path": "hf://trl-lib/DeepMath-103K", "split": "train"}
    # 2 processes x 4 x 4 passes = 32 completions of 4 tasks, in updates of 2 x 4 x 2 = 16
    assert (stage.rollout.batch, stage.rollout.group_size, stage.trainer.updates_per_batch) == (4, 8, 2)
    assert (stage.steps, stage.trainer.warmup_steps) == (100, 10)
    assert (stage.evaluation.every, run.config.checkpoint.every) == (25, 50)  # type: ignore[union-attr]
    algorithm: Any = stage.algorithm
    assert (algorithm.name, algorithm.aggregation) == ("grpo", "token-mean")
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.2, 0.28)
    assert (algorithm.kl.coefficient, algorithm.kl.estimator) == (0.04, "unbiased")
    assert algorithm.masks[0].top == 0.2
    assert stage.pipeline[0].name == "truncated"
    assert (stage.trainer.lr, stage.trainer.schedule, stage.trainer.betas) == (1e-5, "linear", (0.9, 0.999))
    assert [(each.name, each.weight) for each in stage.rewards] == [("math", 1.0), ("format", 0.5), ("python", 0.1)]
    assert set(found.lost) == {
        "lora_dropout",
        "repetition_penalty",
        "report_to",
        "reward_funcs: my_rewards.brevity",
    }
    assert found.unneeded == ["output_dir"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss_type": "dr_grpo", "scale_rewards": False}, ("grpo", "ppo_clip", "constant", "none")),
        ({"loss_type": "grpo", "scale_rewards": "batch"}, ("grpo", "ppo_clip", "sequence-mean", "batch")),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, ("cispo", "cispo", "token-mean", "group")),
        ({"loss_type": "sapo"}, ("sapo", "sapo", "sequence-mean", "group")),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, ("grpo", "gspo", "sequence-mean", "group")),
    ],
)
def test_losses_of_trl(changes: dict[str, Any], expected: tuple[str, ...], tmp_path: Path) -> None:
    given = {"model_name_or_path": "./model", "num_generations": 4, "max_steps": 5, "reward_funcs": "accuracy_reward"}
    text = yaml.safe_dump(given | changes)
    run, _ = imported(tmp_path, text)
    algorithm: Any = run.stages[0].algorithm
    found = (algorithm.name, algorithm.loss.name, algorithm.aggregation, algorithm.advantage.scale)
    assert found == expected
    if expected[1] == "cispo":
        assert algorithm.loss.clip_high == 4.0


def test_sft_and_dpo_of_trl(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: ./model\ndataset_name: data/chat.jsonl\npacking: true\n"
        "max_length: 2048\nnum_train_epochs: 2\nassistant_only_loss: true"
    )
    run, found = imported(tmp_path, text, rows=800)
    assert run.stages[0].algorithm.name == "sft"
    assert (run.stages[0].steps, run.stages[0].trainer.lr) == (200, 2e-5)  # batches of 8
    assert any("max_length 2048" in note for note in found.notes)
    text = (
        "model_name_or_path: ./model\nbeta: 0.3\nloss_type: [sigmoid, sft]\n"
        "loss_weights: [1.0, 0.2]\nmax_steps: 7\nprecompute_ref_log_probs: true"
    )
    run, found = imported(tmp_path, text, source="trl-dpo")
    algorithm: Any = run.stages[0].algorithm
    assert (algorithm.name, algorithm.beta, algorithm.sft, algorithm.batch) == ("dpo", 0.3, 0.2, 8)
    assert found.lost == {}


def test_verl(tmp_path: Path) -> None:
    run, found = imported(tmp_path, VERL, rows=7473)
    [stage] = run.stages
    algorithm: Any = stage.algorithm
    assert (stage.rollout.batch, stage.rollout.group_size, stage.trainer.updates_per_batch) == (1024, 5, 4)
    assert (stage.rollout.max_new_tokens, stage.rollout.temperature, stage.engine.name) == (1024, 0.9, "vllm")
    assert (algorithm.advantage.scale, algorithm.kl.coefficient, algorithm.kl.estimator) == ("none", 0.001, "k3")
    assert (algorithm.loss.clip_high, algorithm.loss.dual_clip) == (0.28, 3.0)
    assert stage.trainer.micro_batch_tokens == 24000
    assert (stage.steps, stage.trainer.warmup_steps) == (105, 10)
    assert (stage.evaluation.every, stage.evaluation.samples) == (5, 2)  # type: ignore[union-attr]
    assert found.sections["taskset"] == {"path": "data/gsm8k/train.parquet"}
    assert set(found.lost) == {"actor_rollout_ref.actor.calculate_entropy"}
    assert "trainer.n_gpus_per_node" in found.unneeded


@pytest.mark.parametrize(("given", "expected"), [(True, (0.001, "k3", "loss")), (False, (0.0, "k3", "loss"))])
def test_penalty_of_verl_replaces_that_of_the_algorithm(
    given: bool, expected: tuple[float, str, str], tmp_path: Path
) -> None:
    text = VERL.replace("adv_estimator: grpo", "adv_estimator: reinforce_plus_plus")
    run, _ = imported(tmp_path, text.replace("use_kl_loss: true", f"use_kl_loss: {given}"), rows=7473)
    kl = run.stages[0].algorithm.kl  # type: ignore[attr-defined]
    assert (kl.coefficient, kl.estimator if given else "k3", kl.where if given else "loss") == expected


def test_overrides_of_verl(tmp_path: Path) -> None:
    text = (
        "- algorithm.adv_estimator=gae\n- data.train_files=train.parquet\n- data.train_batch_size=64\n"
        "- actor_rollout_ref.model.path=./model\n- actor_rollout_ref.actor.ppo_mini_batch_size=32\n"
        "- critic.optim.lr=1e-5\n- +trainer.total_training_steps=9\n- 'algorithm.use_kl_in_reward=True'\n"
        "- algorithm.kl_ctrl.kl_coef=0.02\n- custom_reward_function.path=mine/score.py\n"
        "- custom_reward_function.name=graded\n- +custom_reward_function.reward_kwargs.scale=2\n"
    )
    run, found = imported(tmp_path, text, "overrides.yaml")
    algorithm: Any = run.stages[0].algorithm
    assert (algorithm.name, algorithm.critic.lr, run.stages[0].steps) == ("ppo", 1e-5, 9)
    assert (algorithm.kl.coefficient, algorithm.kl.where) == (0.02, "reward")
    [reward] = found.sections["rewards"]
    assert reward == {"name": "python", "function": "mine/score.py:graded", "options": {"scale": 2}}
    assert found.lost == {}


def test_trinity(tmp_path: Path) -> None:
    run, found = imported(tmp_path, TRINITY)
    [stage] = run.stages
    algorithm: Any = stage.algorithm
    assert run.config.name == "gsm8k-grpo"
    assert (stage.rollout.batch, stage.rollout.group_size, stage.rollout.temperature) == (96, 8, 0.8)
    assert stage.max_staleness == 1
    assert (algorithm.loss.clip_low, algorithm.kl.estimator, stage.trainer.max_grad_norm) == (0.2, "k2", 0.5)
    source = {"path": "hf://openai/gsm8k", "split": "train", "subset": "main", "chat": True}
    assert found.sections["taskset"] == source | {"sampler": "sequential"}
    assert found.sections["evaluation"]["sets"]["test"]["taskset"]["split"] == "test"
    assert found.lost == {}


def test_trinity_learns_from_preferences(tmp_path: Path) -> None:
    text = (
        "mode: train\nmodel: {model_path: ./model}\n"
        "algorithm: {algorithm_type: dpo, optimizer: {lr: 5e-7}, kl_loss_fn_args: {kl_coef: 0.2}}\n"
        "buffer: {train_batch_size: 64, trainer_input: {experience_buffer: {path: pairs.jsonl, format: "
        "{prompt_type: plaintext, prompt_key: ask, chosen_key: chosen, rejected_key: rejected}}}}\n"
        "trainer: {total_steps: 20}\n"
    )
    run, _ = imported(tmp_path, text)
    algorithm: Any = run.stages[0].algorithm
    assert (algorithm.name, algorithm.batch, algorithm.beta, run.stages[0].steps) == ("dpo", 64, 0.2, 20)
    assert run.stages[0].required_taskset.fields.prompt == "ask"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grpo.yaml").write_text(GRPO)
    assert main(["import-config", "grpo.yaml"]) == 0
    said = capsys.readouterr().out
    assert "wrote run.yaml from a configuration of TRL (grpo)" in said
    assert "  repetition_penalty: completions are sampled from the model's own distribution" in said
    assert "# Without a counterpart:\n#   lora_dropout: adapters have no dropout here" in Path("run.yaml").read_text()
    assert main(["import-config", "grpo.yaml"]) == 2
    assert "overwrite it with --force" in capsys.readouterr().err
    assert main(["import-config", "grpo.yaml", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


SMALL = {"model": {"model_path": "./model"}, "buffer": {"batch_size": 4, "total_steps": 3}}


def trinity(tmp_path: Path, **keys: Any) -> tuple[LoadedRun, Any]:
    """A small run of Trinity-RFT with these sections."""
    return imported(tmp_path, yaml.safe_dump(SMALL | keys))


@pytest.mark.parametrize(
    ("kind", "aggregation", "kl", "loss"),
    [
        ("grpo", "token-mean", (0.001, "k2"), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ("dapo", "token-mean", (0.0, "k3"), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ("rloo", "token-mean", (0.001, "k2"), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ("reinforceplusplus", "token-mean", (0.001, "k2"), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        ("gspo", "token-mean", (0.001, "k2"), {"clip_low": 0.0003, "clip_high": 0.0004}),
        ("cispo", "token-mean", (0.001, "k2"), {"clip_low": 1.0, "clip_high": 0.28}),
        ("opmd", "token-mean", (0.001, "k2"), {"tau": 1.0}),
    ],
)
def test_defaults_of_trinity_are_written(
    kind: str, aggregation: str, kl: tuple[float, str], loss: dict[str, float], tmp_path: Path
) -> None:
    run, found = trinity(tmp_path, algorithm={"algorithm_type": kind, "repeat_times": 4})
    algorithm: Any = run.stages[0].algorithm
    assert (algorithm.aggregation, algorithm.kl.coefficient, algorithm.kl.estimator) == (aggregation, *kl)
    assert algorithm.kl.where == "loss"
    assert {key: getattr(algorithm.loss, key) for key in loss} == loss
    assert found.lost == {}
    assert found.sections["taskset"]["sampler"] == "sequential"


def test_penalties_of_trinity(tmp_path: Path) -> None:
    given = {"algorithm_type": "reinforceplusplus", "repeat_times": 4, "kl_loss_fn": "none"}
    run, found = trinity(tmp_path, algorithm=given)
    algorithm: Any = run.stages[0].algorithm
    assert (algorithm.kl.coefficient, found.lost) == (0.0, {})
    given |= {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.02, "clamp": 3}}
    run, found = trinity(tmp_path, algorithm=given)
    algorithm = run.stages[0].algorithm
    assert (algorithm.kl.coefficient, algorithm.kl.estimator, algorithm.kl.where) == (0.02, "k1", "reward")
    assert set(found.lost) == {"algorithm.kl_penalty_fn_args.clamp"}
    run, found = trinity(tmp_path, algorithm=given | {"kl_loss_fn": "k7"})
    assert set(found.lost) == {"algorithm.kl_loss_fn", "algorithm.kl_penalty_fn_args.clamp"}


def test_evaluations_of_trinity_keep_their_sampling(tmp_path: Path) -> None:
    sets = [
        {"name": "aime", "path": "a.jsonl", "repeat_times": 32, "rollout_args": {"temperature": 0.6, "top_p": 0.95}},
        {"name": "gsm", "path": "b.jsonl", "rollout_args": {"top_k": 5, "max_tokens": 99, "stop": ["x"]}, "odd": 1},
        {"name": "once", "path": "c.jsonl", "rollout_args": {"temperature": 0.0}, "repeat_times": 1},
    ]
    taskset = {"path": "t.jsonl", "rollout_args": {"temperature": 0.8}, "task_selector": {"selector_type": "shuffle"}}
    inputs = {"taskset": taskset, "eval_tasksets": sets}
    run, found = trinity(
        tmp_path,
        algorithm={"algorithm_type": "grpo", "repeat_times": 4},
        buffer=SMALL["buffer"] | {"explorer_input": inputs},
        explorer={"rollout_model": {"enable_thinking": False, "engine_num": 2, "ignore_eos": True}},
    )
    evaluation: Any = run.stages[0].evaluation
    aime, gsm, once = (evaluation.sets[name] for name in ("aime", "gsm", "once"))
    assert (aime.samples, aime.sampling.temperature, aime.sampling.top_p) == (32, 0.6, 0.95)
    assert (gsm.samples, gsm.sampling.temperature, gsm.sampling.top_k, gsm.sampling.max_new_tokens) == (1, 1.0, 5, 99)
    assert once.samples == 0
    assert evaluation.every == 100
    assert run.stages[0].required_taskset.sampler.name == "shuffled"
    thinking = {"enable_thinking": False}
    assert [each.chat_template_kwargs for each in run.stages[0].evaluation.tasksets()] == [thinking] * 3  # type: ignore[union-attr]
    assert run.stages[0].required_taskset.chat_template_kwargs == thinking
    assert set(found.lost) == {
        "eval_tasksets.gsm.rollout_args.stop",
        "eval_tasksets.gsm.odd",
        "explorer.rollout_model.ignore_eos",
    }


def test_what_changes_results_is_never_called_unneeded(tmp_path: Path) -> None:
    """Names that begin like those of harmless settings."""
    _, found = trinity(
        tmp_path,
        algorithm={"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr_scheduler_type": "wsd"}},
        stages=[{"stage_name": "sft"}],
        trainer={"trainer_config": {"actor": {"grad_clip": 2}}},
    )
    assert {"stages", "trainer.trainer_config.actor.grad_clip"} < set(found.lost)
    assert found.lost["algorithm.optimizer.lr_scheduler_type"].startswith("wsd: schedules are")
    text = GRPO + "optim: adafactor\nenvironment_factory: mine.Env\nlr_scheduler_kwargs: {num_cycles: 3}\n"
    _, found = imported(tmp_path, text, processes=2)
    assert {"optim", "environment_factory", "lr_scheduler_kwargs.num_cycles"} < set(found.lost)
    text = VERL.replace("val_kwargs: {temperature: 0.6, n: 2}", "val_kwargs: {temperature: 0.6, min_p: 0.1}")
    text = text.replace("trainer:\n", "reward_model: {reward_kwargs: {bonus: 2}}\ntrainer:\n")
    text = text.replace("{lr: 1e-6,", "{lr: 1e-6, lr_scheduler_type: wsd,")
    _, found = imported(tmp_path, text, rows=7473)
    assert set(found.lost) == {
        "actor_rollout_ref.actor.calculate_entropy",
        "actor_rollout_ref.actor.optim.lr_scheduler_type",
        "actor_rollout_ref.rollout.val_kwargs.min_p",
        "reward_model.reward_kwargs.bonus",
    }


@pytest.mark.parametrize("files", ["a.parquet", ["a.parquet", "b.parquet"]])
def test_rows_that_verl_does_not_shuffle_stay_in_order(files: Any, tmp_path: Path) -> None:
    text = yaml.safe_dump(
        {
            "data": {"train_files": files, "shuffle": False, "image_key": "picture", "train_batch_size": 8}
            | {"apply_chat_template_kwargs": {"enable_thinking": False}},
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {"model": {"path": "./m"}, "actor": {"ppo_mini_batch_size": 8}, "rollout": {"n": 4}},
        }
    )
    run, found = imported(tmp_path, text)
    taskset = run.stages[0].required_taskset
    for entry in taskset.mix or [taskset]:
        assert (entry.sampler.name, entry.fields.images) == ("sequential", "picture")
        assert entry.chat_template_kwargs == {"enable_thinking": False}
    assert found.lost == {}
    assert found.unneeded == []


def test_order_and_switches_of_trl(tmp_path: Path) -> None:
    text = GRPO + "shuffle_dataset: false\nchat_template_kwargs: {enable_thinking: false}\noptim: adamw_8bit\n"
    run, _ = imported(tmp_path, text, processes=2)
    taskset = run.stages[0].required_taskset
    assert (taskset.sampler.name, taskset.chat_template_kwargs) == ("sequential", {"enable_thinking": False})
    assert run.stages[0].trainer.optimizer == "adamw_8bit"


def test_processes_of_open_r1(tmp_path: Path) -> None:
    """Its files have accelerate's number of processes; one GPU of eight is vLLM's."""
    text = (
        "num_processes: 7\nnum_generations: 7\nper_device_train_batch_size: 16\ngradient_accumulation_steps: 4\n"
        "model_name_or_path: ./model\nreward_funcs: [accuracy_reward, get_soft_overlong_punishment, mine]\n"
        "reward_weights: [1.0, 0.2, 0.5]\nmax_steps: 5\n"
    )
    run, found = imported(tmp_path, text)
    assert run.stages[0].rollout.batch == 64
    assert "num_processes" not in {*found.lost, *found.unneeded}
    assert [(each["name"], each["weight"]) for each in found.sections["rewards"]] == [("math", 1.0), ("python", 0.5)]
    run, found = imported(tmp_path, text, processes=14)
    assert run.stages[0].rollout.batch == 128
    assert found.lost["num_processes"] == "7: --processes 14 is used instead"
    _, found = imported(tmp_path, text.replace("num_processes: 7\nnum_generations: 7", "num_generations: 8"))
    assert any("processes: 1 is a guess" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "num_processes: 7\nnum_generations: 16\nper_device_train_batch_size: 2\n",
            {},
            r"per_device_train_batch_size 2 x 7 processes \(num_processes, --processes\) .* 14 is not a multiple of 16",
        ),
        (
            "reward_funcs: [a, b]\nreward_weights: [1]\n",
            {"source": "trl-grpo"},
            "reward_weights: 1 weights for 2 rewards",
        ),
        ("learning_rate: 1e-5\n", {}, "its keys are not those of one framework; say which it is by --from"),
        ("num_generations: 8\nper_device_train_batch_size: 3\n", {}, "3 is not a multiple of 8"),
        ("num_generations: many\n", {}, "num_generations: expected a number, found 'many'"),
        (
            "data: {train_batch_size: 100}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 64}}\n",
            {"source": "verl"},
            "100 is not a multiple of 64",
        ),
    ],
)
def test_wrong_files_are_refused(text: str, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        import_file(tmp_path / "x.yaml", **options)


FORMER = """\
# how it began
name: mine
model: {new: {hidden_size: 64, layers: 2, heads: 2, kv_heads: 2, context: 16, tokenizer: {kind: char}}}
rollout: {max_new_tokens: 4}
taskset: {path: sums.jsonl, <order>: {name: sequential}}
rewards: [{name: exact}]   # one is enough
<judging>: {workers: 2}
<residency>: {optimizer: "${env:TIER:memory}"}
stages:
  - {name: first, steps: 1}
  - name: second
    algorithm: mix
    <experts>: {sources: [taskset, run]}
    <residency>: none
    taskset: {mix: [{name: order, path: sums.jsonl, <order>: sequential}]}
"""
DOMAINS = """\
name: mine
model: {new: {hidden_size: 64, layers: 2, heads: 2, kv_heads: 2, context: 16, tokenizer: {kind: char}}}
rollout: {max_new_tokens: 4}
rewards: [{name: exact}]
evaluation:
  sets:
    order: {taskset: {path: sums.jsonl, limit: 4}}   # a set of this name
domains:
  experts:   # and a domain
    taskset: {path: sums.jsonl, <order>: prioritised}
    <judging>: {clip: [-1, 1]}
  judging: {taskset: {path: sums.jsonl}}
"""
SERVED = """\
model: {new: {hidden_size: 64, layers: 2, heads: 2, kv_heads: 2, context: 16, tokenizer: {kind: char}}}
name: mine
max_staleness: 2
rollout: {max_new_tokens: 4}
algorithm: reinforce
stages:
  - {name: first, taskset: {path: sums.jsonl}, rewards: [{name: exact}]}
  - {name: traffic, workflow: <traffic>}
  - {name: second, workflow: {name: <traffic>, group: prompt}}
"""
"""Run files, in which <NAME> is a former name."""


@pytest.mark.parametrize("text", [FORMER, DOMAINS, SERVED], ids=["stages", "domains", "served"])
def test_former_names_of_a_run_file(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` refuses each one where it stands, and the command writes today's; nothing else of the file changes."""
    before = re.sub(r"<(\w+)>", r"\1", text)
    now = re.sub(r"<(\w+)>", lambda found: FORMER_NAMES[found[1]], text)
    file, out = tmp_path / "run.yaml", tmp_path / "new.yaml"
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "response": "2"}\n')
    file.write_text(before)
    assert main(["check", str(file)]) == 2
    refused = capsys.readouterr().err
    for number, (old, new) in enumerate(zip(before.splitlines(), now.splitlines(), strict=True), 1):
        assert (f"run.yaml:{number}: " in refused) == (old != new), old
    one = re.findall(r"<(\w+)>", text)[0]
    assert f"`{one}` is called `{FORMER_NAMES[one]}` now; `rollmill import-config FILE --out NEW` rewrites" in refused
    assert main(["import-config", str(file), "--out", str(out)]) == 0
    assert out.read_text() == now
    assert main(["check", str(out)]) == 0
    capsys.readouterr()
    assert main(["import-config", str(out), "--out", str(file), "--force", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["framework"], again["notes"], again["problems"]) == ("rollmill", [], [])
    assert again["run"]["name"] == "mine"
    assert file.read_text() == now


def test_former_names_in_evaluation_sets(tmp_path: Path) -> None:
    """They mean nothing there, which `check` says of the names of today."""
    text = "evaluation: {taskset: {mix: [{<order>: shuffled}]}, sets: {order: {taskset: {<order>: shuffled}}}}\n"
    (tmp_path / "run.yaml").write_text(text.replace("<order>", "order"))
    assert import_file(tmp_path / "run.yaml").text == text.replace("<order>", "sampler")


def test_every_former_name_is_tried() -> None:
    assert set(re.findall(r"<(\w+)>", FORMER + DOMAINS + SERVED)) == FORMER_NAMES.keys()
