"""Runs operators of Data-Juicer (arXiv:2309.02033) on the text of completions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from rollmill.config.operators import ALL_SOURCES, SuccessOperatorSection
from rollmill.errors import ConfigError
from rollmill.pipelines.batch import Batch, is_finished, is_success, prompt_length
from rollmill.types import Experience, ExperienceSource, Turn, experience_from_demonstration

if TYPE_CHECKING:
    from rollmill.pipelines.pipeline import PipelineResources

_OWN = frozenset({"skip_op_error", "text_key"})
"""Options that rollmill sets for all operators."""


class DataJuicerFilter(SuccessOperatorSection):
    """Runs operators of Data-Juicer (the package py-data-juicer) over completions, demonstrations and pairs."""

    handles = ALL_SOURCES
    name: Literal["data_juicer"] = "data_juicer"
    process: list[dict[str, Any]] = Field(min_length=1)
    """Operators as in a Data-Juicer recipe: [{words_num_filter: {min_num: 10}}, ...]. Filters drop completions;
    operators that need a whole data set are refused."""
    text: Literal["response", "prompt", "both"] = "response"
    """Text that the operators read."""
    mapped: Literal["refuse", "expert"] = "refuse"
    """Handling of mappers, which change text: refuse them, or create demonstrations of the changed texts of
    successes (`part`, `threshold`). The completion itself keeps its tokens."""
    _base: _Base = PrivateAttr()
    _operators: list[tuple[str, Any]] = PrivateAttr()

    @model_validator(mode="after")
    def _named(self) -> Self:
        for entry in self.process:
            if len(entry) != 1:
                raise ValueError("each entry of process is one operator, as in {words_num_filter: {min_num: 10}}")
        if self.mapped == "expert" and self.text != "response":
            raise ValueError("mapped: expert needs text: response, which is what changes")
        self.reject_unused_keys(("part", "threshold"), self.mapped == "expert", "with mapped: expert")
        return self

    def setup(self, resources: PipelineResources) -> None:
        """Make the operators. Raises ConfigError if one is unknown or cannot be used."""
        self._base = _base()
        self._operators = [self._made(*next(iter(entry.items()))) for entry in self.process]

    def __call__(self, batch: Batch) -> None:
        """Apply the operators in turn: later ones see a mapper's text; if a filter refuses that, the completion is
        dropped."""
        left = batch.experiences
        texts = {each.id: self._text(each) for each in left}
        for name, operator in self._operators:
            if not left:
                break
            found = self._apply(operator, [texts[each.id] for each in left])
            if isinstance(operator, self._base.Filter):
                refused = [each for each, kept in zip(left, found, strict=True) if not kept]
                for experience in refused:
                    batch.drop(experience, name)
                left = [each for each, kept in zip(left, found, strict=True) if kept]
            else:
                texts |= {each.id: str(text) for each, text in zip(left, found, strict=True)}
        rollouts = [each for each in left if each.source is ExperienceSource.ROLLOUT]
        for experience in rollouts if self.mapped == "expert" else []:
            changed = texts[experience.id] != experience.response
            if changed and is_success(experience, self.part, self.threshold):
                self._add(batch, experience, texts[experience.id])

    def _apply(self, operator: Any, texts: Sequence[str]) -> list[Any]:
        """Apply an operator to each text: True if a filter keeps it; of a mapper, the new text."""
        key = self._base.text_key
        samples: dict[str, list[Any]] = {key: list(texts), self._base.meta: [{} for _ in texts]}
        if isinstance(operator, self._base.Filter):
            samples[self._base.stats] = [{} for _ in texts]
            return list(operator.process_batched(operator.compute_stats_batched(samples)))
        return list(operator.process_batched(samples)[key])

    def _made(self, name: str, arguments: dict[str, Any] | None) -> tuple[str, Any]:
        kinds, arguments = self._base.kinds, arguments or {}
        if name not in kinds:
            from rollmill.config.validation_errors import suggest_match

            near = suggest_match(name, list(kinds))
            raise ConfigError(f"data_juicer: process: no operator `{name}` in the installed Data-Juicer{near}")
        kind = kinds[name]
        if not issubclass(kind, self._base.Filter | self._base.Mapper):
            raise ConfigError(f"data_juicer: process: `{name}` needs a whole data set; use filters and mappers")
        if issubclass(kind, self._base.Mapper) and self.mapped == "refuse":
            text = "changes text, and completions keep the tokens that the policy produced"
            raise ConfigError(f"data_juicer: process: `{name}` {text}; set mapped: expert, or use filters only")
        for key in arguments:
            if key in _OWN or key not in _arguments_of(kind):
                raise ConfigError(f"data_juicer: process: `{name}` has no argument `{key}`; correct or remove it")
        try:
            return name, kind(**arguments, skip_op_error=False)
        except Exception as error:
            raise ConfigError(f"data_juicer: process: `{name}` cannot be created: {error}") from error

    def _text(self, experience: Experience) -> str:
        texts = {"response": [experience.response], "prompt": [experience.prompt]}
        return "".join(texts.get(self.text, [experience.prompt, experience.response]))

    def _add(self, batch: Batch, experience: Experience, text: str) -> None:
        if not is_finished(experience):
            batch.note("cut off")
            return
        from rollmill.data.encoding import encode_answer

        start, context = prompt_length(experience), batch.context
        new = encode_answer(text, experience, context.tokenizer, context.end_id)
        if len(new) > context.max_new_tokens:
            batch.note("too long")
            return
        ids = np.concatenate([experience.token_ids[:start], np.array(new, np.int32)]).astype(np.int32)
        name = f"{experience.id}/{batch.operator}"
        made = experience_from_demonstration(
            ids,
            start,
            id=name,
            task_id=experience.task_id,
            group=name,
            turns=[Turn("prompt", 0, start, experience.prompt), Turn("assistant", start, len(ids), text)],
            prompt=experience.prompt,
            response=text,
            info={"origin": experience.id, "origin_reward": experience.reward},
        )
        batch.add(made, "rewritten")


class _Base:
    """The parts of the package in use."""

    def __init__(self) -> None:
        from data_juicer.ops.base_op import OPERATORS, Filter, Mapper
        from data_juicer.utils.constant import Fields

        self.Filter, self.Mapper = Filter, Mapper
        self.kinds: dict[str, Any] = OPERATORS.modules
        self.stats, self.meta, self.text_key = Fields.stats, Fields.meta, "text"


def _base() -> _Base:
    """Import the package, and prevent it from installing others during a run."""
    try:
        import data_juicer.ops  # registers the operators
        from data_juicer.utils import lazy_loader

        lazy_loader.LazyLoader._install_package = classmethod(_refuse_to_install)
        assert data_juicer.ops
        return _Base()
    except ModuleNotFoundError as error:
        missing = "" if (error.name or "data_juicer").startswith("data_juicer") else f" (it lacks `{error.name}`)"
        text = f"operator `data_juicer` needs Data-Juicer{missing}: pip install py-data-juicer"
        raise ConfigError(text) from error


def _refuse_to_install(cls: Any, package_spec: str, pip_args: Any = None) -> bool:
    raise ConfigError(f"data_juicer: this operator needs the package {package_spec}; pip install it before the run")


def _arguments_of(kind: type) -> set[str]:
    """The arguments of an operator and of its bases: those of `__init__`, and those they list."""
    found: set[str] = set()
    for each in kind.__mro__:
        found |= set(getattr(each, "_BASE_PARAMS", {}))
        if "__init__" in vars(each):
            found |= set(inspect.signature(each.__init__).parameters)  # type: ignore[misc]
    return found - {"self", "args", "kwargs"}
