"""`engine`: the inference engine that generates completions.

Every module of this package is searched for engines: a new one is a section with a `name` and its `implementation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from rollmill.config.engines.base import EngineSection
from rollmill.config.section import expand_name, find_sections, section_union


def _gives_tokens(section: Any) -> Any:
    named = expand_name(section)
    if isinstance(named, dict) and named.get("name") == "openai":
        raise ValueError(
            "a server with OpenAI's API gives neither tokens nor their log-probs, so nothing can be trained with it; "
            "compare it by `rollmill bench RUN FILE.yaml`, or imitate it by `rollmill tasks answer`"
        )
    return section


if TYPE_CHECKING:
    EngineConfig = EngineSection
else:
    _engines = section_union(find_sections(__name__, __path__, EngineSection), kind="engine")
    EngineConfig = Annotated[_engines, BeforeValidator(_gives_tokens)]
