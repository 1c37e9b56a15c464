"""Vision-language critics and teachers: values and next-token distributions equal those of the models' own pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.algorithm_batches import options_of, trainer_of
from support.picture_models import load_seeing, noise_picture, picture_checkpoint, picture_prompt
from support.toys import toy_checkpoint

from rollmill.config.algorithms.distillation import SelfDistill
from rollmill.config.taskset import TasksetConfig
from rollmill.data import load_taskset
from rollmill.data.picture_prompts import PicturePrompt
from rollmill.errors import ModelError
from rollmill.models.load import PolicyModel, load_teacher
from rollmill.orchestrator.privileged_context import PrivilegedContext
from rollmill.trainer.batch import build_micro_batches, build_token_table
from rollmill.trainer.critic import ValueModel
from rollmill.trainer.trainer import Trainer
from rollmill.types import Experience, experience_from_demonstration

CPU = torch.device("cpu")
CHATTING = ["qwen3_vl", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("llava", "gemma3"))]
FAMILIES = [*CHATTING, pytest.param("paligemma", marks=pytest.mark.thorough)]


def batch(policy: PolicyModel) -> list[Experience]:
    """Groups of two completions: of two pictures, of one, and of the same tokens with another picture."""
    prompts = [
        picture_prompt(policy, "what is this?", noise_picture(28, 56, 0), noise_picture(40, 28, 1)),
        picture_prompt(policy, "and?", noise_picture(56, 56, 2)),
        picture_prompt(policy, "and?", noise_picture(56, 56, 3)),
    ]
    found = []
    for i, seen in enumerate(prompts):
        for j, text in enumerate(("yes", "no, two")):
            ids = [*seen.token_ids, *policy.tokenizer.encode(text, add_special_tokens=False)]
            made = experience_from_demonstration(
                ids,
                len(seen.token_ids),
                id=f"{i}/{j}",
                task_id=str(i),
                group=str(i),
                turns=[],
                prompt="",
                response=text,
            )
            made.pictures = seen
            found.append(made)
    return found


def own_hidden(network: Any, token: int, e: Experience, seen: PicturePrompt, ids: np.ndarray[Any, Any]) -> torch.Tensor:
    """Hidden states that predict the action tokens, by the model's own forward pass over one sequence."""
    tokens = torch.from_numpy(ids).long()[None]
    name = "token_type_ids" if seen.both_ways else "mm_token_type_ids"
    types = {name: (tokens == token).int()} if seen.both_ways or hasattr(network, "get_rope_index") else {}
    if seen.both_ways == "prompt":
        types = {name: (torch.arange(tokens.shape[1]) >= len(seen.token_ids)).int()[None]}
    hidden = network(input_ids=tokens, use_cache=False, **seen.inputs, **types).last_hidden_state[0]
    return hidden[-e.action_tokens - 1 : -1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own_network", [True, False])
def test_values_and_their_gradient_equal_those_of_the_models_own_forward_pass(
    family: str, own_network: bool, tmp_path: Path
) -> None:
    policy = load_seeing(tmp_path, family)
    critic = ValueModel(policy.model, own_network=own_network)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    token = policy.model.picture_processor.image_token_id
    experiences = batch(policy)
    table = build_token_table(experiences, CPU)
    found = torch.zeros(len(table.target))
    weights = torch.randn(len(table.target), generator=torch.Generator().manual_seed(1))
    for micro in build_micro_batches(experiences, table, range(len(experiences)), 4096, CPU):
        with critic.use_packed_attention(micro):
            values = critic(micro, bf16=False)
            (values * weights[micro.tokens]).sum().backward()
        found[micro.tokens] = values.detach()
    gradient = {name: each.grad.clone() for name, each in critic.named_parameters() if each.grad is not None}
    assert any("visual" in name or "vision_tower" in name for name in gradient) == own_network
    critic.zero_grad()
    hidden = torch.cat([own_hidden(critic.network, token, e, e.pictures, e.token_ids) for e in experiences])
    own = critic.head(hidden if own_network else hidden.detach())[:, 0]
    (own * weights).sum().backward()
    assert (own.detach() - found).abs().max() < 2e-5
    assert found[:3].sub(found[-3:]).abs().max() > 1e-3
    for name, each in critic.named_parameters():
        if name in gradient:
            assert each.grad is not None
            assert (each.grad - gradient[name]).norm() <= 1e-4 * each.grad.norm() + 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_teachers_distributions_equal_those_of_its_own_forward_pass(family: str, tmp_path: Path) -> None:
    policy = load_seeing(tmp_path / "policy", family)
    teacher: Any = load_teacher(picture_checkpoint(tmp_path / "teacher", family, seed=1), policy)
    trainer = distilling(policy, {"name": "distill", "teacher": str(tmp_path / "teacher")}, teacher)
    experiences = batch(policy)
    found, table = teacher_states(trainer, experiences)
    token = policy.model.picture_processor.image_token_id
    with torch.no_grad():
        own = torch.cat([own_hidden(teacher.model, token, e, e.pictures, e.token_ids) for e in experiences])
        others = torch.cat([own_hidden(policy.model.model, token, e, e.pictures, e.token_ids) for e in experiences])
    assert len(found) == len(table.target)
    assert (own - found).abs().max() < 2e-5
    assert (own - others).abs().max() > 1e-2


@pytest.mark.parametrize("family", CHATTING)
def test_the_policy_teaches_itself_after_a_prompt_with_pictures_and_the_answer(family: str, tmp_path: Path) -> None:
    """The hidden context moves a picture within the text, and the teacher sees the pictures there."""
    policy = load_seeing(tmp_path / "policy", family)
    rows = tmp_path / "rows.jsonl"
    (tmp_path / "a.png").write_bytes(noise_picture(28, 56, 0))
    parts = '[{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": "what?"}]'
    rows.write_text(f'{{"prompt": [{{"role": "user", "content": {parts}}}], "images": ["a.png"], "answer": "7"}}\n')
    [task] = load_taskset(TasksetConfig(path=rows)).tasks
    options = SelfDistill(context="answer", template="know {context}: {prompt}", weights="current")
    [first, *_] = batch(policy)
    first.task_id = task.id
    giver = PrivilegedContext(options, {task.id: task}, policy.tokenizer, policy.context)
    assert giver.give([first])["teacher/context"] == 1
    seen: PicturePrompt = first.teacher_pictures
    shown = policy.tokenizer.decode(seen.token_ids)
    assert "".join(shown.split()).startswith("u:know7:see<")
    assert first.teacher_prompt is not None
    assert first.teacher_prompt.tolist() == seen.token_ids
    trainer = distilling(policy, options.model_dump(), None)
    found, _ = teacher_states(trainer, [first])
    ids = np.concatenate([first.teacher_prompt, first.token_ids[first.action_mask]])
    with torch.no_grad():
        own = own_hidden(policy.model.model, policy.model.picture_processor.image_token_id, first, seen, ids)
    assert (own - found).abs().max() < 2e-5


def distilling(policy: PolicyModel, options: dict[str, Any], teacher: Any) -> Trainer:
    made: Trainer = trainer_of(policy.model, options_of(options.pop("name"), **options), teacher=teacher)
    return made


def teacher_states(trainer: Trainer, experiences: list[Experience]) -> tuple[torch.Tensor, Any]:
    """The teacher's hidden states for every action token, and the table of these."""
    teacher, table = trainer._teacher, build_token_table(experiences, CPU)
    assert teacher is not None
    micros = build_micro_batches(experiences, table, range(len(experiences)), 4096, CPU)
    parts = [(micro.tokens, teacher.hidden(experiences, micro)) for micro in micros]
    found = torch.zeros(len(table.target), parts[0][1].shape[1])
    for tokens, hidden in parts:
        found[tokens] = hidden
    return found, table


def test_a_teacher_that_sees_otherwise_is_refused(tmp_path: Path) -> None:
    policy = load_seeing(tmp_path / "policy", "llava")
    toy_checkpoint(tmp_path / "text", "qwen3")
    with pytest.raises(ModelError, match="vocabulary"):
        load_teacher(tmp_path / "text", policy)
    other = picture_checkpoint(tmp_path / "other", "llava")
    settings = other / "processor_config.json"
    settings.write_text(settings.read_text().replace('"shortest_edge": 28', '"shortest_edge": 56'))
    with pytest.raises(ModelError, match="prepares pictures otherwise"):
        load_teacher(other, policy)
