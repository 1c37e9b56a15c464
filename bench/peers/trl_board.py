"""Worker: the practice stage of a task of the board with TRL; each command runs a few steps and evaluates.

Tasks are read as ours reads them. Episodes of several turns are a `rollout_func`, which generates a turn of all
episodes at a time; their observations are masked, as on our side. Answers about pictures are scored by our rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.board_tasks import countdown_score
from bench.peers.trl_learn import right
from bench.peers.trl_step import settings
from bench.worker import Channel, versions
from rollmill.types import Task

Score = Callable[[str, str], float]


def _plain(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


SCORES: dict[str, Score] = {
    "repair": right,
    "sorting": _plain,
    "countdown": countdown_score,
}
PICTURES = "pictures"


class Seeing:
    """Questions of examples/see.yaml: rows with a picture each, generation, and scores."""

    def __init__(self, model: Any, processor: Any) -> None:
        from rollmill.rewards.builtin.boxes import BoxesReward
        from rollmill.rewards.builtin.count import CountReward

        self._model, self._processor, self._loop = model, processor, asyncio.new_event_loop()
        self._scorers: dict[str, Any] = {
            "boxes": BoxesReward(name="boxes"),
            "count": CountReward(name="count"),
        }

    def rows(self, taskset: Any) -> list[dict[str, Any]]:
        """Rows of the file's function, with the picture opened."""
        from PIL import Image

        from rollmill.user_code import import_object

        return [
            {**row, "image": Image.open(io.BytesIO(row.pop("images")[0])).convert("RGB")}
            for row in import_object(taskset.function)(**taskset.options)
        ]

    def score(self, completion: str, row: dict[str, Any]) -> float:
        """Reward of an answer."""
        task, given = Task(id="", prompt="", answer=row["answer"]), SimpleNamespace(text=completion)
        return float(self._loop.run_until_complete(self._scorers[row["rewards"]].score(task, given)).value)

    def answers(self, rows: list[dict[str, Any]], new_tokens: int) -> list[str]:
        """Sample an answer to each question."""
        import torch

        texts = [self._processor.apply_chat_template(self.chat(row), add_generation_prompt=True) for row in rows]
        inputs = self._processor(images=[row["image"] for row in rows], text=texts, return_tensors="pt", padding=True)
        with torch.no_grad():
            out_BT = self._model.generate(**inputs, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=new_tokens)
        found: list[str] = self._processor.batch_decode(
            out_BT[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return found

    @staticmethod
    def chat(row: dict[str, Any]) -> list[dict[str, Any]]:
        """The question as a message with its picture."""
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"]}]}]


class Generator:
    """Completions of token ids by transformers' `generate`, all at once."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def __call__(self, prompts: Sequence[list[int]], new_tokens: int, ends: list[int]) -> list[list[int]]:
        """Sample a completion of each prompt, up to and with the first of `ends`."""
        import torch

        inputs = self.tokenizer.pad({"input_ids": [list(each) for each in prompts]}, return_tensors="pt")
        with torch.no_grad():
            out_BT = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=True,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new_tokens,
                eos_token_id=ends,
            )
        found = []
        for ids in out_BT[:, inputs["input_ids"].shape[1] :].tolist():
            end = next((i for i, each in enumerate(ids) if each in ends), len(ids) - 1)
            found.append(ids[: end + 1])
        return found


class Episode:
    """Tokens of an episode: prompt, and what follows it with a mask of the policy's own."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt, self.tokens, self.mask = prompt, list[int](), list[int]()
        self.reward, self.success = 0.0, False

    @property
    def all(self) -> list[int]:
        """Everything so far."""
        return self.prompt + self.tokens

    def add(self, tokens: list[int], own: bool) -> None:
        """Append tokens of the policy or of others."""
        self.tokens += tokens
        self.mask += [int(own)] * len(tokens)


class FrozenLake:
    """Episodes of examples/frozen_lake.yaml."""

    def __init__(self, generate: Generator, run: Any) -> None:
        from rollmill.user_code import import_object

        self._generate, self._run = generate, run
        self._surroundings = import_object(run.environment.describe)
        newline = generate.tokenizer.encode("\n", add_special_tokens=False)
        self._ends = [*newline, generate.tokenizer.eos_token_id]

    def play(self, tasks: Sequence[Any]) -> list[Episode]:
        """Play an episode of each task, all at the same time."""
        import gymnasium

        encode = self._generate.tokenizer.encode
        worlds, episodes = [], []
        for task in tasks:
            world = gymnasium.make("FrozenLake-v1", **self._run.environment.options, **task.metadata["options"])
            world.reset(seed=int(task.metadata["seed"]))
            worlds.append(world)
            episodes.append(Episode(encode(task.prompt + self._surroundings(world, None), add_special_tokens=False)))
        live = list(range(len(tasks)))
        for turn in range(self._run.workflow.turns):
            replies = self._generate([episodes[i].all for i in live], self._run.rollout.max_new_tokens, self._ends)
            going = []
            for i, ids in zip(live, replies, strict=True):
                episode, text = episodes[i], self._generate.tokenizer.decode(ids, skip_special_tokens=True).strip()
                episode.add(ids, own=True)
                if text in self._run.environment.actions:
                    _, reward, ended, cut, _ = worlds[i].step(self._run.environment.actions.index(text))
                    episode.reward += float(reward)
                    episode.success = float(reward) > 0
                else:
                    episode.reward -= self._run.environment.invalid_penalty
                    ended = cut = False
                if not (ended or cut) and turn < self._run.workflow.turns - 1:
                    episode.add(encode(self._surroundings(worlds[i], None), add_special_tokens=False), own=False)
                    going.append(i)
            live = going
            if not live:
                break
        return episodes


class Calculator:
    """Episodes of examples/tool_agent.yaml."""

    def __init__(self, generate: Generator, run: Any) -> None:
        self._generate, self._run = generate, run

    def play(self, tasks: Sequence[Any]) -> list[Episode]:
        """Answer every question, all at the same time."""
        tokenizer = self._generate.tokenizer
        chats = [[dict(each) for each in task.prompt] for task in tasks]
        episodes = [Episode(self._rendered(chat)) for chat in chats]
        live = list(range(len(tasks)))
        for turn in range(self._run.workflow.turns):
            prompts = [episodes[i].all for i in live]
            replies = self._generate(prompts, self._run.rollout.max_new_tokens, [tokenizer.eos_token_id])
            going = []
            for i, ids in zip(live, replies, strict=True):
                text = tokenizer.decode(ids, skip_special_tokens=True)
                episodes[i].add(ids, own=True)
                result = self._called(text)
                if result is None or turn == self._run.workflow.turns - 1:
                    right = text.strip() == tasks[i].answer
                    episodes[i].reward, episodes[i].success = float(right), right
                    continue
                chats[i] += [{"role": "assistant", "content": text}, {"role": "tool", "content": result}]
                before = self._rendered(chats[i][:-1], prompt=False)
                after = self._rendered(chats[i])
                assert after[: len(before)] == before
                ended = len(before) - before[::-1].index(tokenizer.eos_token_id)  # the template goes on after it
                episodes[i].add(after[ended:], own=False)
                going.append(i)
            live = going
            if not live:
                break
        return episodes

    def _rendered(self, chat: list[dict[str, str]], prompt: bool = True) -> list[int]:
        found: list[int] = self._generate.tokenizer.apply_chat_template(
            chat, add_generation_prompt=prompt, return_dict=False
        )
        return found

    @staticmethod
    def _called(text: str) -> str | None:
        """Result of a call of the calculator; None if the text is none."""
        try:
            call = json.loads(text)
            left, right = call["args"]["expression"].split("*")
            return str(int(left) * int(right))
        except (ValueError, TypeError, KeyError, AttributeError):
            return "error: no call" if text.lstrip().startswith("{") else None


EPISODES: dict[str, Any] = {"frozen_lake": FrozenLake, "tools": Calculator}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--row", required=True, type=lambda name: name.removesuffix("_3m"), help="any size of model")
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"), help="bf16: autocast over fp32 weights")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    channel = Channel()

    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    from rollmill.config.loader import load_run
    from rollmill.data import load_taskset

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    run = load_run(args.file, [*args.set, f"seed={args.seed}"]).stages[-1]
    assert run.evaluation is not None
    assert run.evaluation.taskset is not None
    sections = (run.required_taskset, run.evaluation.taskset)
    folder = args.file.parent / "model"
    sees = args.row == PICTURES
    kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model: Any = kind.from_pretrained(folder, dtype=torch.float32)
    processor: Any = AutoProcessor.from_pretrained(folder, use_fast=False, padding_side="left") if sees else None
    seeing = Seeing(model, processor)
    train: Any
    held_out: Any
    train, held_out = (seeing.rows(each) if sees else load_taskset(each).tasks for each in sections)
    tokenizer: Any = processor.tokenizer if sees else AutoTokenizer.from_pretrained(folder, padding_side="left")
    generate = Generator(model, tokenizer)
    episodes: Any = EPISODES[args.row](generate, run) if args.row in EPISODES else None
    by_prompt = {} if sees else {json.dumps(task.prompt): task for task in train}
    tokens = completions = 0

    def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **given: Any
    ) -> list[float]:
        own: list[int] = list(map(len, completion_ids)) if episodes is None else given["own"]  # no observations
        count(sum(own), len(prompts))
        if episodes is not None:
            return [float(each) for each in given["earned"]]
        texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
        if sees:
            texts = [each if isinstance(each, str) else each[0]["text"] for each in texts]
            return [seeing.score(text, train[index]) for text, index in zip(texts, given["index"], strict=True)]
        return [SCORES[args.row](text, answer) for text, answer in zip(texts, given["answer"], strict=True)]

    def count(more_tokens: int, more_completions: int) -> None:
        nonlocal tokens, completions
        tokens, completions = tokens + more_tokens, completions + more_completions

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        assert episodes is not None
        model.eval()
        played = episodes.play([by_prompt[json.dumps(each)] for each in prompts])
        model.train()
        return {
            "prompt_ids": [each.prompt for each in played],
            "completion_ids": [each.tokens for each in played],
            "logprobs": None,
            "env_mask": [each.mask for each in played],
            "earned": [each.reward for each in played],
            "own": [sum(each.mask) for each in played],
        }

    def accuracy() -> float:
        model.eval()
        if episodes is not None:
            right: list[bool] = [each.success for each in episodes.play(held_out)]
        elif sees:
            answers = seeing.answers(held_out, run.rollout.max_new_tokens)
            right = [seeing.score(text, row) == 1 for text, row in zip(answers, held_out, strict=True)]
        else:
            texts = sampled([task.prompt for task in held_out])
            right = [bool(SCORES[args.row](text, task.answer)) for text, task in zip(texts, held_out, strict=True)]
        model.train()
        return sum(right) / len(right)

    def sampled(prompts: list[Any]) -> list[str]:
        ids = [generate.tokenizer.encode(each, add_special_tokens=False) for each in prompts]
        found = generate(ids, run.rollout.max_new_tokens, [generate.tokenizer.eos_token_id])
        texts: list[str] = generate.tokenizer.batch_decode(found, skip_special_tokens=True)
        return texts

    class Pace(TrainerCallback):  # type: ignore[misc]
        """Runs the steps of a command, and evaluates after them."""

        def __init__(self) -> None:
            self.commands, self.left = channel.commands(), 0
            self.began = self.seconds = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self.left == 0:
                command = next(self.commands, None)
                if command is None:
                    raise SystemExit
                self.left, self.seconds = command["steps"] * updates, 0.0
                count(-tokens, -completions)
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds += time.perf_counter() - self.began
            self.left -= 1
            if self.left == 0:
                channel.say(seconds=self.seconds, tokens=tokens, completions=completions, accuracy=accuracy())

    trainer = run.trainer
    updates = trainer.updates_per_batch * trainer.epochs_per_batch  # optimizer steps for each batch of rollouts
    step = argparse.Namespace(
        prompts=run.rollout.batch,
        group=run.rollout.group_size,
        new_tokens=run.rollout.max_new_tokens,
        micro_batch=0,
        dtype=args.dtype,
        cache=None,
        device="cpu",
    )
    config = settings(step) | {
        "learning_rate": trainer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": trainer.betas[0],
        "adam_beta2": trainer.betas[1],
        "adam_epsilon": trainer.eps,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "seed": args.seed,
        "per_device_train_batch_size": run.rollout.batch * run.rollout.group_size // trainer.updates_per_batch,
        "steps_per_generation": trainer.updates_per_batch,
        "num_iterations": trainer.epochs_per_batch,
    }
    if sees:
        rows = Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": row["prompt"]}], "image": row["image"], "index": index}
                for index, row in enumerate(train)
            ]
        )
    else:
        rows = Dataset.from_list([{"prompt": task.prompt, "answer": str(task.answer)} for task in train])
    grpo = GRPOTrainer(
        model=model,
        processing_class=processor if sees else tokenizer,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=rows,
        callbacks=[Pace()],
        rollout_func=None if episodes is None else rollout,
    )
    channel.say(accuracy=accuracy(), versions=versions("trl", "torch", "transformers"))
    grpo.train()


if __name__ == "__main__":
    main()
