"""`workflow`: the rollout procedure of a task."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import regex
from pydantic import Field, TypeAdapter, field_validator, model_validator

from rollmill.config.section import NamedSection, Section, module_sections, section_union


class WorkflowSection(NamedSection):
    """A workflow chosen by name; its other keys are its options."""

    uses_rewards: ClassVar[bool] = True  #: its rollouts are scored by `rewards`
    uses_environment: ClassVar[bool] = False
    uses_tools: ClassVar[bool] = False
    uses_tasks: ClassVar[bool] = True  #: otherwise an application makes the rollouts
    single_turn: ClassVar[bool] = False  #: one completion of the task's prompt and nothing else
    multi_step: ClassVar[bool] = False  #: a rollout may give several experiences
    parts: ClassVar[tuple[str, ...]] = ()  #: parameters of a user's function besides task and policy

    @property
    def scored_by_rewards(self) -> bool:
        """True if the workflow uses `rewards`, with these options."""
        return type(self).uses_rewards

    @property
    def needs_rewards(self) -> bool:
        """True if the workflow requires `rewards`, whatever the algorithm."""
        return False

    @property
    def early_rewards(self) -> str | None:
        """The key because of which the workflow wants rewards before the rollout ends; None if it does not."""
        return None

    @property
    def forces_sampling(self) -> bool:
        """True if requests to the endpoint always have the sampling parameters of `rollout`."""
        return False

    @property
    def models(self) -> tuple[str, ...]:
        """Entries of `models` that the workflow gets because a key names them."""
        return ()

    @property
    def may_have_roles(self) -> bool:
        """True if the workflow may call `policy.role`: those of users."""
        return type(self).function is not None

    def takes(self, part: str) -> bool:
        """Returns whether the workflow takes the parameter `part`, such as an entry of `models`."""
        return part in type(self).parts or "*" in type(self).parts or part in self.models


class RoleConfig(Section):
    """A role that the policy plays in a workflow, which calls `policy.role(NAME)`."""

    learn: bool = True
    """Train the tokens that the policy generates in this role. Otherwise its rewards are only logged."""


class ToolWorkflowSection(WorkflowSection):
    """Keys of workflows that call tools."""

    uses_tools: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    turns: int = Field(8, ge=1)
    """Maximum turns of the policy. Tool calls of the last turn are not executed."""
    describe: bool = True
    """Describe the tools to the policy. Set to false for policies trained with them."""
    malformed_penalty: float = Field(0.0, ge=0)
    """Penalty for each call that cannot be parsed, has wrong arguments or fails; logged as the part
    `malformed_calls`."""


class ToolWorkflow(ToolWorkflowSection):
    """The policy calls tools until a turn has no call: that turn is the answer, scored by `rewards`."""

    implementation = "rollmill.rollout.workflows.tools:tool_turns"
    name: Literal["tools"] = "tools"
    format: Literal["auto", "hermes", "json"] = "auto"
    """Syntax of calls. `auto`: the model's own, as its chat template writes it; without one, and in plain prompts,
    within `<tool_call>` tags if there are any, else JSON. `hermes`: within these tags. `json`: as JSON. With another
    one than the model's own, tools are described in the system message."""
    result: str = "\n<tool_response>\n{result}\n</tool_response>\n"
    """Template of a tool result in plain prompts (no chat), with the placeholder {result}."""

    @field_validator("result")
    @classmethod
    def _has_a_place(cls, value: str) -> str:
        if "{result}" not in value:
            raise ValueError("the place {result} is missing")
        return value


class ReActWorkflow(ToolWorkflowSection):
    """Thought, Action, Action Input and Observation in one text (arXiv:2210.03629); the text after `Final Answer:` is
    scored by `rewards`."""

    implementation = "rollmill.rollout.workflows.react:react"
    name: Literal["react"] = "react"


class EnvironmentWorkflow(WorkflowSection):
    """Interacts with the section `environment` until the episode ends; the reward is the sum of its rewards."""

    uses_rewards: ClassVar[bool] = False
    uses_environment: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.environment:environment_turns"
    name: Literal["environment"] = "environment"
    turns: int = Field(16, ge=1)
    """Maximum turns of the policy."""
    system: str | None = None
    """System message, or text in front of a plain prompt."""
    history: Literal["full"] | Annotated[int, Field(ge=1)] = "full"
    """Context of the policy: the whole episode, or the task and the last N observations with the actions between them.
    With a number each turn is a separate step, as `gigpo` and `stepwise_grpo` need it."""
    steps: bool = False
    """Make each turn a separate step with its own reward, with `history: full`, too."""

    def unused_keys(self) -> dict[str, str]:
        if self.history == "full":
            return {}
        return {"steps": "not honoured with history as a number, where each turn is a step; remove it"}


class ProgramWorkflow(WorkflowSection):
    """Starts a program once per rollout that calls the policy through an OpenAI-compatible endpoint (extra `serve`).

    The environment variables OPENAI_BASE_URL and OPENAI_API_KEY are set as OpenAI's clients expect, and
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY as Anthropic's do. The task is passed as JSON on stdin and in
    ROLLMILL_TASK. The program's output is its answer.
    """

    needs_extra = ("serve", "uvicorn")

    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.program:ProgramRunner"
    name: Literal["program"] = "program"
    command: list[str] = Field(min_length=1)
    """The program and its arguments; `python` is the Python that runs rollmill."""
    folder: Path = Path()
    """Working directory of the program."""
    environment: dict[str, str] = {}
    """Environment variables of the program, in addition to those of this process."""
    time_limit_s: float = Field(300.0, gt=0)
    """Timeout of the program; the rollout then fails."""
    at_once: int = Field(8, ge=1)
    """Maximum number of concurrent programs."""
    rewarded_by: Literal["rewards", "feedback"] = "rewards"
    """Source of the reward: `rewards`, which score the program's output, or `feedback` posted to /feedback (by the
    program itself, or a verifier it starts)."""
    own_sampling: bool = True
    """Whether the program may choose temperature, top_p, top_k, min_p, penalties and biases; false: always those of
    `rollout`. Greedy replies are not trained on."""
    show_answer: bool = False
    """Include the task's answer in the task passed to the program."""

    @property
    def scored_by_rewards(self) -> bool:
        """True if `rewards` score the program's output."""
        return self.rewarded_by == "rewards"

    @property
    def forces_sampling(self) -> bool:
        return not self.own_sampling


class FewShotExample(Section):
    """A worked example."""

    prompt: str
    """Prompt of the example."""
    response: str
    """Response of the example."""


class FewShotWorkflow(WorkflowSection):
    """One completion of the task's prompt after worked examples, scored by `rewards`."""

    implementation = "rollmill.rollout.workflows.few_shot:few_shot"
    name: Literal["few_shot"] = "few_shot"
    examples: list[FewShotExample] = []
    """The examples. Default: tasks of the training taskset with a worked solution, except the task itself."""
    count: int = Field(3, ge=1)
    """Number of examples to show."""
    choose: Literal["random", "first"] = "random"
    """`random` draws them for each task, the same for all of its rollouts; `first` shows the first ones."""
    seed: int = 0
    """Seed of the draw. Only with `choose: random`."""
    separator: str = "\n\n"
    """Separator between examples of plain prompts (no chat)."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.examples and self.count > len(self.examples):
            raise ValueError(f"count: {self.count} are shown, and examples has {len(self.examples)}; lower it")
        return self

    def takes(self, part: str) -> bool:
        return part == "examples" and not self.examples

    def unused_keys(self) -> dict[str, str]:
        return {"seed": "not honoured with choose `first`; it is with `random`"} if self.choose == "first" else {}


class ReflectionWorkflow(WorkflowSection):
    """The policy answers; after a wrong answer it is asked to reflect and to answer again."""

    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.reflection:reflection"
    name: Literal["reflection"] = "reflection"
    retries: int = Field(1, ge=1)
    """Maximum number of further answers."""
    critic: Literal["rewards", "self"] = "rewards"
    """Judge of answers: `rewards` (wrong below `threshold`), or the policy itself in a separate turn."""
    threshold: float = 1.0
    """Minimum reward of a right answer. Only with `critic: rewards`."""
    check: str = "Is this answer right? Begin with yes or no, then say why."
    """Question to the policy about its own answer. Only with `critic: self`."""
    retry: str = "That is not right. Think about what went wrong, then give a better answer."
    """Message to the policy before it answers again."""
    discount: float = Field(1.0, gt=0, le=1)
    """Factor of the last answer's reward per retry used; the part `retries` logs the amount it subtracts."""

    @property
    def needs_rewards(self) -> bool:
        return self.critic == "rewards"

    @property
    def early_rewards(self) -> str | None:
        return "critic: rewards" if self.critic == "rewards" else "discount" if self.discount < 1 else None

    def unused_keys(self) -> dict[str, str]:
        unused, other = ("check", "self") if self.critic == "rewards" else ("threshold", "rewards")
        return {unused: f"not honoured with critic `{self.critic}`; it is with `{other}`"}


class VoteWorkflow(WorkflowSection):
    """Several answers to the task, each a separate experience; the most frequent one wins (arXiv:2203.11171)."""

    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.vote:vote"
    name: Literal["vote"] = "vote"
    samples: int = Field(8, ge=2)
    """Answers per rollout."""
    pattern: str | None = None
    """Regular expression of the answer in the text: its last match, or that match's first group. A text that takes
    longer than a second to search has no answer."""
    after: str | None = None
    """Alternative to `pattern`: the answer is the text after the last occurrence of this text. Default: the whole
    text."""
    reward: Literal["agreement", "winner"] = "agreement"
    """`agreement` needs no labels: each sample with the winning answer earns 1, others 0 (arXiv:2504.16084). `winner`:
    the winning answer is scored by `rewards`, and all samples share its reward."""

    @property
    def scored_by_rewards(self) -> bool:
        return self.reward == "winner"

    @model_validator(mode="after")
    def _one_extraction(self) -> Self:
        if self.pattern is not None and self.after is not None:
            raise ValueError("pattern and after both say where the answer is; give one of them")
        try:
            regex.compile(self.pattern or "")
        except (regex.error, RecursionError) as error:
            raise ValueError(f"pattern: not a regular expression: {error}") from error
        return self


class JudgedWorkflow(WorkflowSection):
    """One completion of the task's prompt, scored from 0 to 1 by a model of `models`."""

    uses_rewards: ClassVar[bool] = False

    implementation = "rollmill.rollout.workflows.vote:model_judged"
    name: Literal["judged"] = "judged"
    by: str = "scorer"
    """Name of the scoring model in `models`."""
    question: str = (
        "Rate the response to the request from 0 (worst) to {scale} (best).\n\nRequest:\n{prompt}\n\n"
        "Response:\n{response}\n\nEnd with the number alone."
    )
    """Question to that model, with the placeholders {prompt}, {response}, {answer} and {scale}."""
    scale: float = Field(10.0, gt=0)
    """The best score, mapped to 1. The last number of the reply is the score; without one the rollout is rejected."""

    @property
    def models(self) -> tuple[str, ...]:
        return (self.by,)

    @model_validator(mode="after")
    def _asks_about_the_response(self) -> Self:
        if "{response}" not in self.question:
            raise ValueError("question: the place {response} is missing")
        return self


class SingleTurnWorkflow(WorkflowSection):
    """One completion of the task's prompt, scored by `rewards`."""

    single_turn: ClassVar[bool] = True

    name: Literal["single_turn"] = "single_turn"


class LiveRequestsWorkflow(WorkflowSection):
    """Sessions of applications with the model that `rollmill serve RUN.yaml --train` serves, rewarded by feedback."""

    needs_extra = ("serve", "uvicorn")

    uses_rewards: ClassVar[bool] = False
    uses_tasks: ClassVar[bool] = False
    single_turn: ClassVar[bool] = True
    multi_step: ClassVar[bool] = True

    name: Literal["traffic"] = "traffic"
    group: Literal["session", "prompt"] = "session"
    """Group of sessions that are compared. `session`: every session is its own group, for algorithms that compare with
    the whole batch. `prompt`: `rollout.group_size` sessions with the same first prompt."""
    pending: int = Field(4096, ge=1)
    """Maximum sessions that wait for others with the same prompt; beyond that the oldest are dropped."""

    def unused_keys(self) -> dict[str, str]:
        return {"pending": "not honoured with group `session`; it is with `prompt`"} if self.group == "session" else {}


class VerifiersWorkflow(WorkflowSection):
    """An environment of the library verifiers (0.4), unmodified: its tasks, tools and rewards, with the policy behind
    rollmill's endpoint.

    It runs in a separate Python, created by `make verifiers-setup`; tasks come from `rollmill.data.verifiers:rows`.
    """

    uses_rewards: ClassVar[bool] = False
    multi_step: ClassVar[bool] = True

    implementation = "rollmill.rollout.workflows.verifiers:VerifiersRunner"
    name: Literal["verifiers"] = "verifiers"
    taskset: str
    """Id of an installed package of tasks, or FILE.py with one."""
    python: Path = Path(".venv-verifiers/bin/python")
    """Python interpreter that has verifiers."""
    options: dict[str, Any] = {}
    """Keys of the taskset's own configuration."""
    env: dict[str, Any] = {}
    """Keys of verifiers' section `env`: `id` of an environment, `agent`, `timeout` ..."""
    harness: str = "rollmill_chat"
    """Harness that talks to the policy: a conversation with tools, or the id of one of verifiers' programs, such as
    `bash`."""
    turns: int | None = Field(None, ge=1)
    """Maximum turns of the policy; null: the environment's limit."""
    at_once: int = Field(32, ge=1)
    """Maximum number of concurrent rollouts."""
    time_limit_s: float = Field(300.0, gt=0)
    """Timeout of a rollout."""
    restart_after: int = Field(500, ge=1)
    """Rollouts after which the process is replaced, to limit memory leaks."""


if TYPE_CHECKING:
    WorkflowConfig = WorkflowSection
else:
    WorkflowConfig = section_union(module_sections(__name__, WorkflowSection), kind="workflow")


def workflow_by_name(name: str) -> WorkflowSection:
    """Returns the section of a workflow, built in or registered, with its defaults. Raises ValueError for others."""
    section: WorkflowSection = TypeAdapter(WorkflowConfig).validate_python(name)
    return section
