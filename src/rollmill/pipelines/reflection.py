"""Failed attempts with a second thought and a correct solution, as demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmill.config.operators import ReflectionOperator
from rollmill.pipelines.accessors import is_finished, is_success, prompt_length, response_length
from rollmill.pipelines.batch import Batch
from rollmill.pipelines.pipeline import Operator
from rollmill.types import Experience, IntArray, StopReason, Turn, experience_from_demonstration


def reflection(options: ReflectionOperator) -> Operator:
    """Adds expert experiences: prompt and attempt (masked), cue, solution.

    Prompt, attempt and a sibling's solution are the recorded tokens. The attempt's end-of-sequence token is left out,
    because there the text goes on. What would be longer than max_new_tokens after the prompt is left out, too.
    """

    def apply(batch: Batch) -> None:
        for group in batch.groups().values():
            failures = [each for each in group if is_success(each, options.part, options.threshold) is False]
            found = _solution(options, batch, group) if failures else None
            if found is None:
                if failures:
                    batch.note("no solution")
                continue
            made = 0
            for attempt in failures:
                if made == options.count:
                    break
                experience = _reflected(options, batch, attempt, *found)
                if experience is None:
                    batch.note("too long")
                else:
                    batch.add(experience, "reflection")
                    made += 1

    return apply


def _solution(
    options: ReflectionOperator, batch: Batch, group: Sequence[Experience]
) -> tuple[IntArray, str, str] | None:
    """Tokens, text and origin of a correct solution; None where there is none."""
    if options.solution != "task":
        single = [each for each in group if sum(turn.role == "assistant" for turn in each.turns) == 1]
        good = [each for each in single if is_finished(each) and is_success(each, options.part, options.threshold)]
        if good:
            best = min(good, key=response_length)
            return best.token_ids[prompt_length(best) :], best.response, best.id
    if options.solution != "group":
        context = batch.context
        text = context.task(group[0].task_id).response
        if text is not None:
            ids = [*context.tokenizer.encode(text, add_special_tokens=False), context.end_id]
            return np.array(ids, np.int32), text, "task"
    return None


def _reflected(
    options: ReflectionOperator, batch: Batch, attempt: Experience, solution: IntArray, text: str, origin: str
) -> Experience | None:
    """The demonstration; None where it is longer than what the policy may write."""
    start = prompt_length(attempt)
    tried = attempt.token_ids if attempt.stop_reason is not StopReason.EOS else attempt.token_ids[:-1]
    cue = np.array(batch.context.tokenizer.encode(options.cue, add_special_tokens=False), np.int32)
    ids = np.concatenate([tried, cue, solution]).astype(np.int32)
    if len(ids) - start > batch.context.max_new_tokens:
        return None
    imitated = len(tried) + (0 if options.imitate_cue else len(cue))
    ends = [len(tried), len(tried) + len(cue), len(ids)]
    name = f"{attempt.id}/{batch.operator}"
    return experience_from_demonstration(
        ids,
        imitated,
        id=name,
        task_id=attempt.task_id,
        group=name,
        turns=[
            Turn("prompt", 0, start, attempt.prompt),
            Turn("attempt", start, ends[0], attempt.response),
            Turn("cue", ends[0], ends[1], options.cue),
            Turn("assistant", ends[1], ends[2], text),
        ],
        prompt=attempt.prompt,
        response=attempt.response + options.cue + text,
        info={"origin": attempt.id, "origin_reward": attempt.reward, "solution": origin},
    )
