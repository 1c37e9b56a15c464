"""The primitives of a training loop of one's own: sample, compute gradients, take an optimizer step, save and load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from rollmill.algorithms.policy_recipes import build_recipe
from rollmill.algorithms.recipe import LossInputs, Recipe
from rollmill.api.engine_thread import EngineThread
from rollmill.config.algorithms.base import AlgorithmOptions
from rollmill.config.algorithms.baselines import GRPO
from rollmill.config.model import ModelConfig
from rollmill.config.resolve import resolve
from rollmill.config.run import RunConfig
from rollmill.config.tree import ConfigProblem, Node, Origin, raise_problems
from rollmill.config.yaml_file import parse_override_value
from rollmill.data import encode_prompt, parse_completion, render_prompt
from rollmill.engines.base import GenerationRequest
from rollmill.errors import CheckpointError, ConfigError, TrainingError, describe_read_error
from rollmill.files import sync
from rollmill.models.cpu.step_timing import choose_precision
from rollmill.models.from_scratch import save_policy
from rollmill.models.load import PolicyModel, load_policy, wrap_policy
from rollmill.models.lora import ADAPTER_FOLDER, load_adapter
from rollmill.models.storage import ensure_own_memory, narrow_weights
from rollmill.orchestrator.engine import build_engine, build_publisher
from rollmill.orchestrator.memory_choice import settle_for
from rollmill.orchestrator.setup import choose_device
from rollmill.registry import loss_section
from rollmill.seeds import derive_seed
from rollmill.trainer.parity import load_verified_policy
from rollmill.trainer.stepwise import StepwiseTrainer
from rollmill.types import Experience, ExperienceSource, FloatArray, Message, Task, experience_from_completion

Loss = str | Mapping[str, Any] | Callable[[LossInputs], torch.Tensor]
"""An algorithm by name or as the section `algorithm`, or a per-token loss, which replaces that of GRPO."""
Prompt = str | list[Message] | Task
_SECTIONS = frozenset({"seed", "device", "threads", "steps", "algorithm", "trainer", "rollout", "engine"})
_STATE, _TRAINER, _FORMAT = "policy_state.json", "trainer.pt", 1


class TrainablePolicy:
    """A model with its engine and its optimizer, for a training loop of one's own.

    Close it, or use it in a `with` statement: it has a thread, and perhaps the process of an engine.

    Args:
        model: a checkpoint folder, or a loaded transformers model, whose weights are trained in place.
        tokenizer: of a loaded model.
        settings: keys of a run file: `seed`, `device`, `threads`, `steps` (for learning-rate schedules), and the
            sections `algorithm` (the default loss), `trainer`, `rollout` and `engine`.

    Raises:
        ConfigError: a setting is unknown or wrong.
        ModelError: the model cannot be trained.
    """

    def __init__(self, model: str | Path | Any, tokenizer: Any = None, **settings: Any) -> None:
        self.config = _checked(settings)
        config = self.config
        torch.set_num_threads(1 if config.threads == "auto" else config.threads)
        torch.manual_seed(config.seed)
        device = choose_device(config.device)
        if isinstance(model, str | Path):
            if tokenizer is not None:
                raise ConfigError("tokenizer: a model's folder has its own; leave it out, or load the model as well")
            section = ModelConfig(path=Path(model).expanduser())
            self._policy = load_verified_policy(section, texts=(), seed=config.seed, device=device)
        elif tokenizer is None:
            raise ConfigError("tokenizer: a loaded model needs its tokenizer: TrainablePolicy(model, tokenizer)")
        else:
            ensure_own_memory(model.parameters())
            self._policy = wrap_policy(model, tokenizer, device, "the given model")
        self.config = config = settle_for(config, self._policy)
        wanted = config.trainer.precision
        if config.trainer.param_dtype == "bf16":
            narrow_weights(self._policy.model)
            wanted = "bf16"
        precision = choose_precision(self._policy.model, device) if wanted == "auto" else wanted
        self._seed = derive_seed(config.seed, 0)  # as the first stage of a run
        self.version = 0  #: number of optimizer steps; tokens carry the version of the weights that sampled them
        self._groups = 0  # prompts sampled so far
        self._recipes: dict[str, Recipe] = {}
        self._trainer = StepwiseTrainer(
            self._policy.model,
            self._recipe(config.algorithm),
            config.trainer.model_copy(update={"precision": precision}),
            total_steps=config.steps,
            device=device,
            seed=self._seed,
        )
        self._engine = build_engine(self._policy, config, precision)
        self._publisher = build_publisher(self._policy, self._engine, precision)
        self._publisher.publish(0)
        self._thread = EngineThread(self._engine)

    @property
    def model(self) -> Any:
        """The transformers model; its weights change with every optimizer step."""
        return self._policy.model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._policy.tokenizer

    # -- sampling ----------------------------------------------------------------------------------------------

    def sample(self, prompts: Sequence[Prompt], n: int | None = None, **sampling: Any) -> list[list[Experience]]:
        """Samples completions with the current weights: a group of `n` experiences for every prompt, in order.

        An experience has the tokens of prompt and completion (`token_ids`, `action_mask`), their log-probs and
        versions, and the completion's text (`response`); its `reward` is yours to set. The completions of a prompt have
        the random numbers that the built-in loop gives to the group of the same number.

        Args:
            prompts: texts, lists of chat messages, or tasks.
            n: completions per prompt. Default: rollout.group_size.
            sampling: other values for keys of `rollout`, such as temperature=0.

        Raises:
            ConfigError: a value is wrong.
            EngineError: a prompt leaves no room for a completion.
        """
        if isinstance(prompts, str):
            raise ConfigError("sample: prompts is one text; give a list of prompts: sample([prompt])")
        rollout = self.config.rollout
        changed = _checked({"rollout": {**rollout.model_dump(exclude_unset=True), **sampling}}).rollout
        rollout = changed if sampling else rollout
        size = rollout.group_size if n is None else n
        if not prompts or size < 1:
            raise ConfigError("sample: give at least one prompt, and n of at least 1")
        groups: list[_Group] = []
        for offset, prompt in enumerate(prompts):
            number = self._groups + offset
            task = prompt if isinstance(prompt, Task) else Task(f"prompt-{number}", prompt)
            request = GenerationRequest(
                encode_prompt(task, self.tokenizer),
                rollout,
                n=size,
                seed=derive_seed(self._seed, number),
                id=f"prompt {number}",
            )
            groups.append(_Group(f"{self.config.name}-{number:06d}", task, request))
        found = self._thread.generate([each.request for each in groups])
        self._groups += len(groups)
        return [
            [
                experience_from_completion(
                    replace(completion, reply=parse_completion(each.task, self.tokenizer, completion)),
                    id=f"{each.name}/{completion.index}",
                    task_id=each.task.id,
                    group=each.name,
                    prompt=render_prompt(each.task, self.tokenizer),
                    temperature=rollout.temperature or 1.0,
                )
                for completion in completions
            ]
            for each, completions in zip(groups, found, strict=True)
        ]

    def logprobs(self, batch: Sequence[Experience]) -> list[FloatArray]:
        """Returns log-probs of the action tokens under the current weights, at the temperature they were sampled with.

        Float32 [T] for each experience, 0 for tokens that are no actions.

        Raises:
            TrainingError: an experience does not fit the model.
        """
        _check(batch, self._policy, "logprobs")
        return self._trainer.logprobs(batch)

    # -- training ----------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Sequence[Experience], loss: Loss | None = None) -> dict[str, float]:
        """Computes the loss of a batch, and adds its gradients to those since the last optimizer step.

        Several calls add up; each has denominators of its own. Sets the experiences' `advantage`, which the algorithm
        makes from the rewards within groups.

        Args:
            loss: an algorithm's name, its section, or a function of `rollmill.algorithms.LossInputs` (or with
                parameters named like its fields) that returns one term per token. Default: the setting `algorithm`.

        Returns:
            loss, loss/<term>, tokens, and metrics of the tokens such as entropy and kl.

        Raises:
            ConfigError: the loss is unknown.
            TrainingError: the batch is wrong, or the loss is not finite; the message says which experience.
        """
        recipe = None if loss is None else self._recipe(_algorithm(loss))
        _check(batch, self._policy, "forward_backward")
        rollouts = [each for each in batch if each.source is ExperienceSource.ROLLOUT]
        compares = (recipe or self._trainer.recipe).compares_rewards
        if compares and rollouts and all(each.reward is None for each in rollouts):
            raise TrainingError(
                "forward_backward: no experience has a reward; set `experience.reward` before, or choose a loss "
                "without advantages"
            )
        return self._trainer.forward_backward(list(batch), self.version, recipe)

    def optim_step(self) -> dict[str, float]:
        """Takes one optimizer step with the gradients since the last one; `sample` then uses the new weights.

        Returns grad_norm (before clipping), lr, and skipped: 1 if nothing had a gradient.

        Raises:
            TrainingError: there was no `forward_backward`, or a gradient is not finite; no weight has changed.
        """
        found = self._trainer.optim_step()
        self.version += 1
        self._thread.call(self._publisher.publish, self.version)
        return found

    # -- state -------------------------------------------------------------------------------------------------

    def save_state(self, folder: str | Path) -> Path:
        """Writes weights, optimizer, schedule and random state; gradients since the last step are not part of it.

        The folder is a checkpoint that any program loads. It is written beside and renamed, and replaces an earlier
        state of the same name. Returns its path.

        Raises:
            CheckpointError: it cannot be written, or the folder holds something else.
        """
        target = Path(folder)
        if target.exists() and not (target / _STATE).is_file():
            raise CheckpointError(f"save_state: {target} exists and is no saved state; choose another folder")
        writing, old = (target.with_name(f".{kind}-{target.name}-{os.getpid()}") for kind in ("writing", "old"))
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
            save_policy(self.model, self.tokenizer, writing)
            torch.save(self._trainer.state_dict(), writing / _TRAINER)
            state = {"format": _FORMAT, "version": self.version, "groups": self._groups}
            (writing / _STATE).write_text(json.dumps(state) + "\n")
            for path in writing.iterdir():
                sync(path)
            if target.exists():
                target.rename(old)
            writing.rename(target)
            sync(target.parent)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(f"save_state: cannot write {target}: {error}") from error
        shutil.rmtree(old, ignore_errors=True)
        return target

    def load_state(self, folder: str | Path) -> None:
        """Goes on from what `save_state` wrote, bit for bit; gradients since the last step are discarded.

        Raises:
            CheckpointError: the folder holds no state, is damaged, or is of another model.
        """
        source = Path(folder)
        if not (source / _STATE).is_file():
            raise CheckpointError(f"load_state: {source} holds no saved state; give a folder that save_state wrote")
        try:
            state = json.loads((source / _STATE).read_text())
            trainer = torch.load(source / _TRAINER, map_location="cpu", weights_only=True)
            if (source / ADAPTER_FOLDER).is_dir():
                load_adapter(self.model, source / ADAPTER_FOLDER)
            else:
                stored = load_policy(ModelConfig(path=source), texts=(), seed=0, device=self._policy.device)
                _require_same_shapes(self.model, stored.model)
                self.model.load_state_dict(stored.model.state_dict())
            self._trainer.discard()
            self._trainer.load_state_dict(trainer)
            self.version, self._groups = state["version"], state["groups"]
        except Exception as error:  # libraries raise errors of their own
            raise CheckpointError(f"load_state: cannot go on from {source}: {describe_read_error(error)}") from error
        self._thread.call(self._publisher.publish, self.version)

    def close(self) -> None:
        """Ends the engine; the model stays usable."""
        self._thread.close()
        self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _recipe(self, algorithm: AlgorithmOptions) -> Recipe:
        return build_recipe(algorithm, max_new_tokens=self.config.rollout.max_new_tokens)


@dataclass(frozen=True)
class _Group:
    """The completions asked for of one prompt."""

    name: str
    task: Task
    request: GenerationRequest


def _check(batch: Sequence[Any], policy: PolicyModel, call: str) -> None:
    """Raises TrainingError naming the first experience that the model cannot be run on."""
    if isinstance(batch, Experience) or not len(batch):
        raise TrainingError(f"{call}: expected a list of experiences with at least one")
    rows = policy.model.get_input_embeddings().weight.shape[0]
    for index, each in enumerate(batch):
        if not isinstance(each, Experience):
            hint = "; join the groups: [e for group in groups for e in group]" if isinstance(each, list) else ""
            raise TrainingError(f"{call}: batch[{index}] is a {type(each).__name__}, not an Experience{hint}")
        where = f"{call}: batch[{index}] ({each.id})"
        shapes = {name: getattr(each, name).shape for name in ("token_ids", "action_mask", "logprobs", "versions")}
        if len(set(shapes.values())) > 1 or each.token_ids.ndim != 1:
            found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise TrainingError(f"{where}: arrays differ in shape: {found}; all need one entry per token")
        if len(each.token_ids) > policy.context:
            raise TrainingError(
                f"{where}: {len(each.token_ids)} tokens are more than the model's context, {policy.context}"
            )
        if len(each.token_ids) and not 0 <= each.token_ids.min() <= each.token_ids.max() < rows:
            raise TrainingError(f"{where}: token ids are outside the model's vocabulary of {rows}")


def _checked(settings: Mapping[str, Any]) -> RunConfig:
    """Validates settings as a run file. Raises ConfigError that lists every problem."""
    if strange := sorted(settings.keys() - _SECTIONS):
        raise ConfigError(f"{strange[0]}: TrainablePolicy has no such setting; it has {', '.join(sorted(_SECTIONS))}")
    place, algorithm = "TrainablePolicy", settings.get("algorithm")
    if isinstance(algorithm, str):
        settings = {**settings, "algorithm": {"name": algorithm}}
    problems: list[ConfigProblem] = []
    root = Node({}, Origin(place, Path()), ())
    if settings:
        try:
            text = json.dumps(dict(settings), default=_plain)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{place}: settings are numbers, texts, lists and dicts: {error}") from error
        root = parse_override_value(text, place, Path(), (), problems)
    raise_problems(problems)
    config = resolve(root).config
    if config.trainer.ranks > 1:
        raise ConfigError(f"{place}: trainer.ranks: the primitives train in this process; use rollmill.run for ranks")
    for key in ("updates_per_batch", "epochs_per_batch"):
        if getattr(config.trainer, key) > 1:
            raise ConfigError(
                f"{place}: trainer.{key}: your loop decides that: call forward_backward and optim_step for every part"
            )
    return config


def _require_same_shapes(model: Any, stored: Any) -> None:
    """Raises CheckpointError before any weight is copied: torch copies those that fit."""
    mine, others = ({name: tuple(each.shape) for name, each in m.state_dict().items()} for m in (model, stored))
    if strange := sorted(name for name in mine.keys() | others.keys() if mine.get(name) != others.get(name)):
        name = strange[0]
        raise CheckpointError(f"it is of another model: {name} is {others.get(name)} there and {mine.get(name)} here")


def _plain(value: Any) -> Any:
    """Returns a mapping as JSON holds it. Raises TypeError for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"found a {type(value).__name__}")


def _algorithm(loss: Loss) -> AlgorithmOptions:
    """Returns the algorithm that a loss stands for. Raises ConfigError if it is unknown."""
    if callable(loss):
        return GRPO().model_copy(update={"loss": loss_section(loss)})
    if not isinstance(loss, str | Mapping):
        raise ConfigError(f"loss: expected an algorithm's name, a section or a function, found a {type(loss).__name__}")
    found: AlgorithmOptions = _checked({"algorithm": loss}).algorithm
    return found
