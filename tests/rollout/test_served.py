"""Texts that an endpoint completes, for workflows; tasks it answers in place of a policy are tested with `bench`."""

from __future__ import annotations

import asyncio

import pytest
from support.endpoints import KEY, running

from rollmill.config.model import AuxiliaryModelConfig
from rollmill.errors import WorkflowError
from rollmill.rollout.auxiliary_models import EndpointModel, connect_endpoint


def test_an_endpoint_completes_texts_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    with running(says=["abc", "xyz"]) as server:
        keys = {"endpoint": server.base_url, "model": "toy", "api_key_env": "THE_KEY"}
        section = AuxiliaryModelConfig.model_validate({**keys, "completes": True})
        model = EndpointModel("other", connect_endpoint("models.other", section), section)
        assert asyncio.run(model.complete("in the beginning")).text == "abc"
        with pytest.raises(WorkflowError, match="completes texts; its tokens are not known"):
            asyncio.run(model.complete([1, 2]))
        chats = AuxiliaryModelConfig.model_validate(keys)
        with pytest.raises(
            WorkflowError, match=r"models.other: an endpoint has no `complete`, unless it has `completes"
        ):
            asyncio.run(EndpointModel("other", model.endpoint, chats).complete("in the beginning"))
        model.endpoint.close()


def test_only_endpoints_complete_by_request() -> None:
    with pytest.raises(ValueError, match="completes is honoured with endpoint, not with policy"):
        AuxiliaryModelConfig.model_validate({"policy": "initial", "completes": True})
