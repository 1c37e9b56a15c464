"""Recognises the rows of other frameworks, and adds the columns prompt, answer, response and rejected to them.

Layouts, as their documentation describes them: TRL (`messages`; `prompt` and `completion`; `chosen` and `rejected`,
with the prompt in both of them; `tools`), verl (`reward_model.ground_truth`), verifiers and prime-rl (`question`,
`info`, `verification_info`), Trinity-RFT (columns named by its `format`, of which the usual ones are known here).
A row that has a column of ours keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from rollmill.data.padding import SWITCHES as SWITCHES
from rollmill.data.presets import gsm8k
from rollmill.data.readers import BadRowError, Row
from rollmill.files import parse_strict_json

MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message that chat templates know."""
_REASONING = ("reasoning_content", "thinking")
"""Names of a message's reasoning: the first is ours, the second that of TRL and gpt-oss."""
RESPONSE_MESSAGE, REJECTED_MESSAGE = "response_message", "rejected_message"
"""Metadata of a task whose response, or rejected one, is a message with more than a role and a text: that message."""
RESPONSE_MESSAGES = "response_messages"
"""Metadata of a task whose response is several messages: all of them. The last one is the assistant's, and its text the
task's response."""
TOOLS = "prompt_tools"
"""Metadata of a task whose prompt shows tools: their schemas."""
_QUESTIONS = ("question", "problem")
_NOT_SWITCHES = {"messages", "conversation", "tools", "chat_template", "tokenize", "add_generation_prompt"} | {
    "continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "padding", "truncation", "max_length", "processor_kwargs",
}  # fmt: skip
"""Arguments of `apply_chat_template` that are not values for the template."""


def recognised(row: Row) -> Row:
    """Returns the row with the columns that its layout stands for.

    Raises:
        BadRowError: the row has a known layout, but not its contents.
    """
    found = _with_solution(_with_prompt(row))
    found = _with_answer(found)
    if isinstance(found.get("info"), str) and (info := parsed(found["info"])) is not None:
        found = found | {"info": info}
    if isinstance(thinking := found.get("enable_thinking"), bool):  # a column of verl's conversations
        found = found | {SWITCHES: {"enable_thinking": thinking} | switches_of(found.get(SWITCHES))}
    return found


def _with_prompt(row: Row) -> Row:
    """Finds the prompt in a conversation, in both solutions of a pair, or in a question."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if is_chat(chosen) and is_chat(rejected) and len(chosen) > 1 and not is_chat(row.get("prompt")):
        return row | _split_pair(chosen, rejected)
    if "prompt" in row:
        return row
    if is_chat(messages := row.get("messages")):
        rest = {column: value for column, value in row.items() if column != "messages"}
        if messages[-1]["role"] != "assistant":
            return rest | {"prompt": messages}
        return {"response": messages[-1:]} | rest | {"prompt": messages[:-1]}
    if isinstance(chosen, str) and isinstance(rejected, str):
        return row | _split_texts(chosen, rejected)
    question = next((column for column in _QUESTIONS if isinstance(row.get(column), str)), None)
    if question is None:
        return row
    if question == "question" and isinstance(answer := row.get("answer"), str) and "####" in answer:
        return gsm8k(row)
    return row | {"prompt": row[question]}


def _with_solution(row: Row) -> Row:
    """Takes the completion of a row without a label, or the worked solution of a problem, as response."""
    if {"response", "chosen"} & row.keys():
        return row
    if "completion" in row and "label" not in row:
        rest = {column: value for column, value in row.items() if column != "completion"}
        return rest | {"response": row["completion"]}
    if "problem" in row and isinstance(row.get("solution"), str):
        return row | {"response": row["solution"]}
    return row


def _with_answer(row: Row) -> Row:
    """Takes the ground truth of verl and of prime-rl's data sets as answer."""
    if "answer" in row:
        return row
    for column in ("reward_model", "verification_info"):
        found = parsed(row.get(column))
        if isinstance(found, Mapping) and "ground_truth" in found:
            return row | {"answer": found["ground_truth"]}
    return row


def _split_pair(chosen: list[Any], rejected: list[Any]) -> Row:
    """Splits two conversations into the messages that both begin with, and what each continues with."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    ends = chosen[shared:], rejected[shared:]
    if any(len(each) != 1 or each[0]["role"] != "assistant" for each in ends):
        raise BadRowError(
            f"chosen and rejected differ from message {shared} on, and one message of the assistant is compared; "
            "let the conversations before it be equal"
        )
    return {"prompt": chosen[:shared], "chosen": ends[0], "rejected": ends[1]}


def _split_texts(chosen: str, rejected: str) -> Row:
    """Splits two texts after their common beginning; a space before the difference belongs to the completions."""
    shared = next((at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    shared = min(len(chosen), len(rejected)) if shared is None else shared
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def is_chat(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """True for a list of chat messages that is not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in value)
    )


def tool_schemas(value: Any) -> list[dict[str, Any]] | None:
    """Returns the JSON schemas of a column `tools`, which may be JSON text; None if it holds something else."""
    found = parsed(value)
    if not isinstance(found, list) or not found:
        return None
    schemas = [parsed(each) for each in found]
    if not all(isinstance(each, Mapping) and isinstance(_function(each).get("name"), str) for each in schemas):
        return None
    return [dict(each) for each in schemas]


def switches_of(value: Any) -> dict[str, Any]:
    """Returns the values for the chat template in the column `chat_template_kwargs`: an object, or JSON text of one.

    Raises BadRowError for anything else.
    """
    found = {} if value is None or value == "" else parsed(value)
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise BadRowError(
            f"{SWITCHES} is {value!r:.60}; give an object of values for the chat template, such as "
            '{"enable_thinking": false}'
        )
    if taken := sorted(_NOT_SWITCHES & found.keys()):
        raise BadRowError(f"{SWITCHES} has {taken[0]}, which is set by rollmill itself; remove it")
    return dict(found)


def message_of(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a message with the keys that chat templates know; arguments of its calls are objects.

    Keys of the message itself that are null count as missing, as in OpenAI's format. `where` names the message.

    Raises BadRowError for anything else that it holds.
    """
    given = {key: part for key, part in message.items() if part is not None}
    ours, theirs = _REASONING
    if theirs in given and given.setdefault(ours, given[theirs]) != given.pop(theirs):
        raise BadRowError(f"{where} has {ours} and {theirs}, which differ; give one of them")
    if unused := [key for key in given if key not in MESSAGE_KEYS]:
        raise BadRowError(f"{where} has {', '.join(unused)}; only {', '.join((*MESSAGE_KEYS, theirs))} are used")
    if not given.get("tool_calls", [None]):
        del given["tool_calls"]
    found = {"role": given.get("role"), "content": given.get("content", "" if "tool_calls" in given else None)} | given
    if "tool_calls" in given:
        calls = parsed(given["tool_calls"])
        if not isinstance(calls, list):
            raise BadRowError(f"the tool calls of {where} are no list")
        found["tool_calls"] = [_call(each, where) for each in calls]
    if not all(isinstance(found[key], str) for key in found if key != "tool_calls"):
        raise BadRowError(f"role or content of {where} is not text")
    return found


def text_of_message(message: Mapping[str, Any]) -> str:
    """Returns the text of a message of `message_of`, with its calls as JSON but without its reasoning, for reports and
    to compare; a chat template writes the whole message in the model's own form."""
    calls = [json.dumps(_function(each), ensure_ascii=False) for each in message.get("tool_calls", [])]
    return "\n".join([*([message["content"]] if message["content"] else []), *calls])


def _call(entry: Any, where: str) -> dict[str, Any]:
    function = _function(entry) if isinstance(entry, Mapping) else {}
    if not isinstance(function.get("name"), str):
        raise BadRowError(f"a tool call of {where} names no function")
    arguments = {} if (given := function.get("arguments")) in (None, "") else parsed(given)
    if not isinstance(arguments, Mapping):
        raise BadRowError(f"the arguments of a tool call of {where} are no JSON object")
    called = {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}
    return called | ({"id": entry["id"]} if isinstance(entry.get("id"), str) else {})


def _function(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = entry.get("function")
    return inner if isinstance(inner, Mapping) else entry


def parsed(value: Any) -> Any:
    """Returns what JSON text stands for, None for any other text, and anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_strict_json(value, unique_keys=True)
    except ValueError:
        return None
