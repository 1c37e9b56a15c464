"""Builds tasks from rows: columns, templates, chat messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from rollmill.config.components import workflow_by_name
from rollmill.config.rows import FieldsConfig, RowsSection
from rollmill.data.content_parts import split_content
from rollmill.data.images import ImagePart, metadata_with_images
from rollmill.data.layouts import (
    REJECTED_MESSAGE,
    RESPONSE_MESSAGE,
    RESPONSE_MESSAGES,
    SWITCHES,
    TOOLS,
    is_chat,
    message_of,
    recognised,
    switches_of,
    text_of_message,
    tool_schemas,
)
from rollmill.data.presets import PRESETS
from rollmill.data.readers import BadRowError, Row, SourceRow, check_finite
from rollmill.data.template import PromptTemplate, describe_type
from rollmill.errors import ConfigError, TasksetError
from rollmill.types import Message, Task


@dataclass(frozen=True, slots=True)
class _Solution:
    """A worked or a rejected solution, and its messages if it was given as such."""

    text: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def whole(self, key: str) -> dict[str, Any]:
        """Metadata with what the text leaves out: the messages, or under `key` the only one."""
        if self.text is None or not self.messages:
            return {}
        if len(self.messages) > 1:
            return {RESPONSE_MESSAGES: self.messages}
        [message] = self.messages
        return {key: message} if message.keys() - {"role", "content"} else {}


class TaskBuilder:
    """Builds tasks from source rows, as configured in a taskset section.

    Raises:
        TasksetError: a template is invalid, or two keys define the prompt or the response.
    """

    def __init__(self, config: RowsSection, name: str) -> None:
        self._config, self._name = config, name
        try:
            self._switches = switches_of(config.chat_template_kwargs)
        except BadRowError as error:
            raise TasksetError(f"taskset.{error}") from error
        self._folder = (
            config.path.parent if config.path is not None and config.path.is_file() else config.path or Path()
        )
        self._template = PromptTemplate(config.template, "taskset.template") if config.template is not None else None
        worked = config.response_template
        self._response = PromptTemplate(worked, "taskset.response_template") if worked is not None else None
        self._preset = PRESETS[config.preset] if config.preset is not None else None
        default = FieldsConfig()
        same = all(getattr(config.fields, key) == getattr(default, key) for key in ("prompt", "response", "rejected"))
        self._recognises = self._preset is None and self._template is self._response is None and same
        if self._template is not None and config.fields.prompt != FieldsConfig().prompt:
            raise TasksetError("taskset.fields.prompt and taskset.template both define the prompt; give one of them")
        if self._response is not None and config.fields.response is not None:
            raise TasksetError(
                "taskset.fields.response and taskset.response_template both define the response; give one of them"
            )

    def task(self, record: SourceRow, number: int) -> Task:
        """Build the task of a row; `number` is its index. Raises BadRowError if the row cannot become a task."""
        if record.problem is not None:
            raise BadRowError(record.problem)
        row = self._preset(record.row) if self._preset is not None else record.row
        if self._recognises:
            row = recognised(row)
        fields = self._config.fields
        answer = _optional(row, fields.answer, "answer")
        response, rejected = self._solutions(row)
        for text in (response.text, rejected.text, answer):
            _check_unicode(text)
        if isinstance(answer, bytes):
            raise BadRowError(f"the answer (column {fields.answer or 'answer'}) is bytes, not text; convert it")
        check_finite(answer, f"the answer (column {fields.answer or 'answer'})")
        parts = {fields.prompt, fields.answer or "answer", fields.response or self._usual_response(row), fields.id}
        parts |= {fields.rewards, fields.workflow} - {None}
        parts |= {fields.rejected or "rejected", SWITCHES} | ({self._label(row)} - {None})
        rest = {column: value for column, value in row.items() if column not in parts}
        prompt, shown = self._prompt(row)
        metadata = self._with_images(rest, shown) if record.metadata is None else record.metadata
        metadata = metadata | self._tools(row) | response.whole(RESPONSE_MESSAGE) | rejected.whole(REJECTED_MESSAGE)
        if switches := self._switches | switches_of(row.get(SWITCHES)):
            metadata = metadata | {SWITCHES: switches}
        return Task(
            id=self._id(row, number),
            prompt=prompt,
            answer=answer,
            response=response.text,
            rejected=rejected.text,
            metadata=metadata,
            taskset=self._name,
            rewards=self._rewards(row),
            workflow=self._workflow(row),
        )

    def _rewards(self, row: Row) -> list[str] | None:
        column = self._config.fields.rewards
        if column is None:
            return None
        value = _column(row, column, "taskset.fields.rewards")
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names or not all(isinstance(each, str) for each in names):
            raise BadRowError(f"the rewards (column {column}) are {value!r:.60}; give a name or a list of names")
        return list(names)

    def _workflow(self, row: Row) -> str | None:
        column = self._config.fields.workflow
        name = None if column is None else _column(row, column, "taskset.fields.workflow")
        if name is None or name == "":
            return None
        if not isinstance(name, str):
            raise BadRowError(f"the workflow (column {column}) is {describe_type(name)}, not a name")
        try:
            section = workflow_by_name(name)
        except ValueError as error:
            text = f"the workflow (column {column}) is {name!r:.60}, and there is none of that name"
            raise BadRowError(f"{text}; correct it, or register it (@rollmill.workflow, plugins)") from error
        if not section.uses_tasks:
            raise BadRowError(f"the workflow (column {column}) is {name!r}, which has no tasks; name another")
        return name

    def _tools(self, row: Row) -> dict[str, Any]:
        """Metadata of the tools that the prompt shows."""
        column = self._config.fields.tools
        value = row.get("tools") if column is None else _column(row, column, "taskset.fields.tools") if column else None
        schemas = tool_schemas(value)
        if column and value is not None and schemas is None:
            raise BadRowError(f"the tools (column {column}) are no list of JSON schemas of functions")
        return {} if schemas is None else {TOOLS: schemas}

    def _with_images(self, rest: Row, parts: list[ImagePart]) -> Row:
        column = self._config.fields.images
        if column:
            _column(rest, column, "taskset.fields.images")
        try:
            pixels = self._config.min_pixels or 0, self._config.max_pixels or 0
            return metadata_with_images(rest, column, self._folder, parts, pixels)
        except ConfigError:
            raise
        except ValueError as error:
            advice = "" if parts else "; taskset.fields.images names another column, or '' for none"
            raise BadRowError(f"{error}{advice}") from error

    def _id(self, row: Row, number: int) -> str:
        column = "id" if self._config.harbor is not None else self._config.fields.id
        if column is None:
            return f"{self._name}:{number}"
        value = _column(row, column, "taskset.fields.id")
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise BadRowError(f"column {column} is {describe_type(value) if value != '' else 'empty'}, not an id")
        return str(value)

    def _prompt(self, row: Row) -> tuple[str | list[Message], list[ImagePart]]:
        """The prompt, and the image parts of its messages."""
        if self._template is not None:
            return self._dialogue(_text(self._template.fill(row))), []
        column = self._config.fields.prompt
        value = _column(row, column, "taskset.fields.prompt, or write taskset.template")
        if isinstance(value, str):
            return self._dialogue(_text(value)), []
        if isinstance(value, list):
            messages, parts = _messages(value)
            first = 0 if self._config.system is None else 1
            return self._with_system(messages), [replace(each, message=each.message + first) for each in parts]
        raise BadRowError(f"the prompt (column {column}) is {describe_type(value)}, not text or a list of messages")

    def _dialogue(self, text: str) -> str | list[Message]:
        return self._with_system([Message(role="user", content=text)]) if self._config.chat else text

    def _with_system(self, messages: list[Message]) -> list[Message]:
        if self._config.system is None:
            return messages
        if messages[0]["role"] == "system":
            raise BadRowError("the prompt has a system message of its own beside taskset.system; remove one of them")
        return [Message(role="system", content=self._config.system), *messages]

    def _solutions(self, row: Row) -> tuple[_Solution, _Solution]:
        """The preferred and the rejected solution; a labelled row has one of them, depending on its label."""
        worked, rejected = self._worked(row), self._solution(row, self._config.fields.rejected, "rejected")
        label = self._label(row)
        if label is None:
            if (rejected.text is not None and len(worked.messages) > 1) or len(rejected.messages) > 1:
                raise BadRowError("solutions of several messages cannot be compared; give one message of the assistant")
            return worked, rejected
        if rejected.text is not None:
            raise BadRowError(f"the row has a label (column {label}) and a rejected solution; remove one of them")
        if worked.text is None:
            raise BadRowError(
                f"the row has a label (column {label}) but no completion; name its column in taskset.fields.response"
            )
        if len(worked.messages) > 1:
            raise BadRowError(f"the row has a label (column {label}) and several messages; label one of the assistant")
        return (worked, _Solution()) if _desirable(row[label], label) else (_Solution(), worked)

    def _label(self, row: Row) -> str | None:
        """The column with the label, if the row has one."""
        column = self._config.fields.label
        if column is not None:
            _column(row, column, "taskset.fields.label")
            return column
        is_default = self._response is None and self._config.fields.response in (None, "completion")
        return "label" if is_default and self._usual_response(row) == "completion" else None

    def _worked(self, row: Row) -> _Solution:
        if self._response is not None:
            return _Solution(self._response.fill(row))
        column = self._config.fields.response
        return self._solution(row, column, "response" if column is not None else self._usual_response(row))

    def _usual_response(self, row: Row) -> str:
        """Default column of the solution: preference sets call it `chosen`, labelled sets `completion`."""
        if "response" in row:
            return "response"
        if "chosen" in row:
            return "chosen"
        labelled = {"completion", self._config.fields.label or "label"} <= row.keys() and "rejected" not in row
        return "completion" if labelled else "response"

    @staticmethod
    def _solution(row: Row, column: str | None, default: str) -> _Solution:
        value = _optional(row, column, default)
        if value is None or isinstance(value, str):
            return _Solution(value or None)
        given = [value] if isinstance(value, Mapping) else value
        if not is_chat(given) or {given[0]["role"], given[-1]["role"]} != {"assistant"}:
            raise BadRowError(
                f"the {default} is {describe_type(value)}, not text or messages that begin and end with one of the "
                "assistant"
            )
        messages = []
        for index, each in enumerate(given):
            message, pictures = _message(each, index, f"message {index} of the {default}")
            if pictures:
                raise BadRowError(f"message {index} of the {default} has a picture; pictures belong into the prompt")
            messages.append(message)
        return _Solution(text_of_message(messages[-1]) or None, messages)


def _column(row: Row, column: str, key: str) -> Any:
    if column not in row:
        raise BadRowError(f"no column {column} (columns: {', '.join(row)}); name another in {key}")
    return row[column]


def _optional(row: Row, column: str | None, default: str) -> Any:
    """The value of the configured column, which must exist, or of the default column, which need not exist."""
    return row.get(default) if column is None else _column(row, column, f"taskset.fields.{default}")


def _desirable(value: Any, column: str) -> bool:
    """Parse a label: true or false, 1 or 0, or the same as text (as in CSV)."""
    known = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    label = known.get(str(value).strip().lower())
    if label is None:
        found = f"`{value}`" if isinstance(value, str | int | float) and value != "" else describe_type(value)
        raise BadRowError(f"the label (column {column}) is {found}, not true (desirable) or false (undesirable)")
    return label


def _text(prompt: str) -> str:
    if not prompt.strip():
        raise BadRowError("the prompt is empty")
    _check_unicode(prompt)
    return prompt


def _messages(value: list[Any]) -> tuple[list[Message], list[ImagePart]]:
    """Chat messages, with the text of content parts joined, and their image parts."""
    if not value:
        raise BadRowError("the prompt is empty")
    messages: list[Message] = []
    parts: list[ImagePart] = []
    for index, message in enumerate(value):
        found, own = _message(message, index, f"message {index} of the prompt")
        parts += own
        messages.append(cast(Message, found))
    if messages[-1]["role"] == "assistant":
        raise BadRowError("the prompt ends with the assistant's message, so nothing is left to answer")
    if not messages[-1]["content"].strip() and all(part.message < len(messages) - 1 for part in parts):
        raise BadRowError("the prompt is empty (its last message)")
    return messages, parts


def _message(message: Any, index: int, where: str) -> tuple[dict[str, Any], list[ImagePart]]:
    """A message with the text of its content parts joined, and its image parts."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys() | {
        "content" if message.get("tool_calls") else ""
    }:
        raise BadRowError(f"{where} is not an object with role and content")
    text, parts = message.get("content"), list[ImagePart]()
    if isinstance(text, list):
        try:
            text, parts = split_content(text, index, where)
        except ValueError as error:
            raise BadRowError(str(error)) from error
    found = message_of({**message, "content": text}, where)
    for value in (found["content"], found.get("reasoning_content")):
        _check_unicode(value)
    return found, parts


def _check_unicode(value: Any) -> None:
    """Raises BadRowError for a lone surrogate, which no tokenizer accepts and UTF-8 cannot encode."""
    if not isinstance(value, str):
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(f"not valid Unicode text (character {error.start} is half of a surrogate pair)") from error
