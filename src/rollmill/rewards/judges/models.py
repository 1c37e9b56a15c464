"""From a reward's configuration to the model that it asks; rewards with the same settings share one."""

from __future__ import annotations

from rollmill.config.rewards import JudgeSection
from rollmill.rewards.judges.chat import ChatModel
from rollmill.rewards.resources import Resources

_CONNECTION = {
    "endpoint",
    "model",
    "api_key_env",
    "options",
    "requests_per_minute",
    "tokens_per_minute",
    "max_in_flight",
    "tries",
    "try_s",
    "deadline_s",
}


def chat_model(config: JudgeSection, resources: Resources) -> ChatModel:
    """The chat model of a reward. Connections and caches are closed with the judge.

    Raises:
        ConfigError: the key's variable is not set, the library is missing, or the cache cannot be used.
        ModelError: the folder holds no chat model.
    """
    model: ChatModel
    if config.path is None:
        from rollmill.rewards.judges.endpoint import Endpoint

        settings = config.model_dump_json(include=_CONNECTION)
        model = resources.shared(f"endpoint {settings}", lambda: Endpoint(config))
    else:
        from rollmill.rewards.judges.native import native_model

        model = native_model(config.path, resources.device)
    if config.cache is None:
        return model
    from rollmill.rewards.judges.cache import Cached, Store

    path = config.cache.expanduser().absolute()
    return Cached(model, resources.shared(f"cache {path}", lambda: Store(path)))
