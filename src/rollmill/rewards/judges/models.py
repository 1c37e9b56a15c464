"""From a reward's configuration to the model that it asks; rewards with the same settings share one."""

from __future__ import annotations

from rollmill.config.rewards import JudgeSection
from rollmill.rewards.judges.chat import ChatModel
from rollmill.rewards.resources import RewardResources

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


def build_chat_model(config: JudgeSection, resources: RewardResources) -> ChatModel:
    """The chat model of a reward. Connections and caches are closed with the judge.

    Raises:
        ConfigError: the key's variable is not set, the library is missing, or the cache cannot be used.
        ModelError: the folder holds no chat model.
    """
    model: ChatModel
    if config.path is None:
        from rollmill.rewards.judges.endpoint import EndpointChatModel

        settings = config.model_dump_json(include=_CONNECTION)
        model = resources.shared(f"endpoint {settings}", lambda: EndpointChatModel(config))
    else:
        from rollmill.rewards.judges.native import load_native_chat_model

        model = load_native_chat_model(config.path, resources.device)
    if config.cache is None:
        return model
    from rollmill.rewards.judges.cache import CachedChatModel, ChatReplyStore

    path = config.cache.expanduser().absolute()
    return CachedChatModel(model, resources.shared(f"cache {path}", lambda: ChatReplyStore(path)))
