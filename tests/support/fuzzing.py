"""Requests made from an OpenAPI description, right and wrong ones, for the tests of both servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

TRACES = ("Traceback", "/site-packages/", 'File "')


def fuzz(
    schema: Any,
    address: str,
    headers: dict[str, str],
    examples: int,
    *,
    checks: Sequence[Any] = (not_a_server_error,),
    secrets: Sequence[str] = (),
) -> dict[int, int]:
    """Try every operation with right and wrong requests; how often each status was answered.

    No answer may hold one of `secrets`, or a trace of the program behind it.
    """
    import schemathesis

    statuses: dict[int, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
                derandomize=True,
            )
            def once(case: Any) -> None:
                answer = case.call(base_url=address, headers=headers, timeout=60, allow_redirects=False)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                case.validate_response(answer, checks=list(checks))
                shown = answer.content.decode("utf-8", "replace") + str(dict(answer.headers))
                assert not [each for each in (*secrets, *TRACES) if each in shown], shown[:2000]

            try:
                once()
            except Exception as error:
                if "Unsatisfiable" not in type(error).__name__:
                    raise
    return statuses
