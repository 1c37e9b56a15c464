"""An imported TRL configuration computes the loss and the gradient that TRL computes with it, on the same batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.algorithm_batches import distance, trainer_of, watch_gradients

from rollmill.apps.importing.conversion import import_file, to_run_file
from rollmill.config.loader import LoadedRun, load_run
from rollmill.config.trainer import TrainerConfig
from rollmill.data import load_taskset
from rollmill.data.encoding import demonstration_experience, preference_pair
from rollmill.types import Experience, ExperienceSource, experience_from_demonstration

pytestmark = [
    pytest.mark.slow,  # TRL alone takes 20 seconds to import
    pytest.mark.filterwarnings("ignore"),
]
LETTERS = "abcdefghijklmnopqrstu"
GROUP = 4
SETTINGS = {
    "per_device_train_batch_size": 8,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "gradient_checkpointing": False,
    "max_steps": 5,
}
GRPO = {"num_generations": GROUP, "max_completion_length": 9, "beta": 0.1, "epsilon": 0.15, "epsilon_high": 0.25}


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl", reason="TRL is not installed (extra `dev`)")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def imported(folder: Path, settings: dict[str, Any], kind: str, **options: Any) -> LoadedRun:
    """The run file that `rollmill import-config` makes of TRL's settings."""
    theirs = folder / f"{kind}.yaml"
    theirs.write_text(yaml.safe_dump({"model_name_or_path": str(folder), **settings, **options}))
    found = import_file(theirs, f"trl-{kind}")
    assert found.lost == {}
    (folder / "run.yaml").write_text(to_run_file(found, theirs))
    return load_run(folder / "run.yaml", require_files=False)


def moved(model: Any) -> Any:
    """The same model with other weights, as a reference that the policy has left."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    return model


def gradient_of(loss: torch.Tensor, model: Any) -> torch.Tensor:
    parameters = sorted(model.parameters(), key=lambda p: p.ndim < 2)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def compared(run: LoadedRun, model: Any, batch: list[Experience], monkeypatch: Any, **others: Any) -> tuple[Any, Any]:
    """Loss and gradient of our trainer with the stage's own algorithm and settings."""
    stage = run.stages[0]
    gradients = watch_gradients(monkeypatch)
    settings = {key: getattr(stage.trainer, key) for key in TrainerConfig.model_fields if key != "ranks"}
    trainer = trainer_of(model, stage.algorithm, **others, **settings | {"precision": "fp32"})
    return trainer.step(batch, 1)["loss"], gradients["policy"][0]  # one version later than the rollouts


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dapo"},
        pytest.param({"loss_type": "grpo", "scale_rewards": "none"}, marks=pytest.mark.thorough),
        pytest.param({"loss_type": "cispo", "epsilon_high": 1.1}, marks=pytest.mark.thorough),
    ],
)
def test_grpo(
    changes: dict[str, Any], trl: Any, toy: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off the policy, so that ratios are clipped, and away from the reference. Standard deviations differ by 1e-4."""
    from datasets import Dataset

    prompts = ["abc", "defg"]
    completions = [[2 + (3 * n + 5 * k) % 21 for k in range(2 + n)] for n in range(2 * GROUP)]

    def rollout(texts: list[str], _: Any) -> dict[str, Any]:
        return {"prompt_ids": [tokenizer(text)["input_ids"] for text in texts], "completion_ids": completions,
                "logprobs": None}  # fmt: skip

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    settings = SETTINGS | GRPO | changes
    run = imported(tmp_path, settings, "grpo", reward_funcs=["accuracy_reward"])
    toy("qwen3").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    theirs = trl.GRPOTrainer(
        model=str(tmp_path),
        reward_funcs=reward,
        args=trl.GRPOConfig(output_dir=str(tmp_path / "out"), model_init_kwargs={"dtype": "float32"}, **settings),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=rollout,
    )
    moved(theirs.ref_model)
    theirs.current_gradient_accumulation_steps = 1
    theirs.model.train()
    rows = next(iter(theirs.get_train_dataloader()))
    inputs = theirs._prepare_inputs(rows)
    with torch.no_grad():
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        length = inputs["completion_ids"].shape[1]
        own = theirs._get_per_token_logps_and_entropies(theirs.model, ids, mask, length)[0]
        old = own + 0.3 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    inputs["old_per_token_logps"] = old
    loss = theirs.compute_loss(theirs.model, inputs)
    expected = gradient_of(loss, theirs.model)

    batch = []
    rewards = reward(
        [row[m.bool()].tolist() for row, m in zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)]
    )
    for n, value in enumerate(rewards):
        kept = inputs["completion_mask"][n].bool()
        prompt = inputs["prompt_ids"][n][inputs["prompt_mask"][n].bool()].tolist()
        tokens = [*prompt, *inputs["completion_ids"][n][kept].tolist()]
        group = str(prompt)  # TRL has shuffled the rows
        names = {"id": f"{group}-{n}", "task_id": group, "group": group, "prompt": "", "response": ""}
        made = experience_from_demonstration(tokens, len(prompt), turns=[], source=ExperienceSource.ROLLOUT, **names)
        made.logprobs[len(prompt) :] = old[n][kept].numpy()
        made.versions[len(prompt) :] = 0
        made.reward = value
        batch.append(made)
    ours, got = compared(run, toy("qwen3"), batch, monkeypatch, reference=moved(toy("qwen3")))
    assert ours == pytest.approx(loss.item(), rel=1e-3)
    assert distance(got, expected) < 1e-3


@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.thorough)])
def test_sft_and_dpo(
    kind: str, trl: Any, toy: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient of the rows of one file, read by both."""
    from datasets import Dataset

    rows: list[dict[str, str]] = []
    for n in range(8):
        prompt, answer = "abcde"[: 2 + n % 4], "fghijklm"[n % 5 : n % 5 + 2 + n % 3]
        pair = {"chosen": answer, "rejected": "nopqr"[: 1 + n % 4]}
        rows.append({"prompt": prompt} | (pair if kind == "dpo" else {"completion": answer}))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"beta": 0.3, "loss_type": ["sigmoid"]} if kind == "dpo" else {}
    run = imported(tmp_path, SETTINGS | options, kind, dataset_name=str(tmp_path / "rows.jsonl"))
    arguments = {"output_dir": str(tmp_path / "out"), **SETTINGS, **options}
    shared = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer, "model": toy("qwen3")}
    if kind == "dpo":
        theirs = trl.DPOTrainer(args=trl.DPOConfig(**arguments), ref_model=moved(toy("qwen3")), **shared)
    else:
        theirs = trl.SFTTrainer(args=trl.SFTConfig(**arguments), **shared)
    theirs.model.train()
    loss = theirs.compute_loss(theirs.model, next(iter(theirs.get_train_dataloader())))
    expected = gradient_of(loss, theirs.model)

    tasks = load_taskset(run.stages[0].required_taskset).tasks
    end = tokenizer.eos_token_id
    pairs = [preference_pair(task, tokenizer, end, task.id) for task in tasks] if kind == "dpo" else []
    batch = [each for pair in pairs for each in pair] or [
        demonstration_experience(task, tokenizer, end) for task in tasks
    ]
    reference = {"reference": moved(toy("qwen3"))} if kind == "dpo" else {}
    ours, got = compared(run, toy("qwen3"), batch, monkeypatch, **reference)
    assert run.stages[0].algorithm.batch == len(tasks) == len(rows)  # type: ignore[attr-defined]
    assert ours == pytest.approx(loss.item(), rel=1e-5)
    assert distance(got, expected) < 1e-4
