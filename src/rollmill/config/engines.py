"""`engine`: the inference engine that generates completions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator

from rollmill.config.section import NamedSection, expand_name, module_sections, section_union

_CHOSEN: Any = "auto"
if TYPE_CHECKING:  # from its setup on a run has a number, see orchestrator/memory_choice.py
    AutoSize = float
else:
    AutoSize = Annotated[float, Field(gt=0)] | Literal["auto"]

ENGINE_FEATURES = {
    "truncation": "top_p, top_k or min_p with the probability that they keep",
    "stop": "stop strings and stop tokens",
    "repetition": "detection of repetition",
    "ngram_draft": "n-gram drafts",
    "reuse": "drafts from earlier completions",
    "token_budget": "completions that go on in a later step",
    "router_replay": "recording the experts of each token",
}
"""Features that an engine may support, by the run-file key that needs each: see `EngineSection.unsupported`."""


class EngineSection(NamedSection):
    """An engine chosen by name; its other keys are its options."""

    unsupported: ClassVar[Mapping[str, str]] = {}
    """Features of ENGINE_FEATURES that the engine lacks, each with the text of the error for a run that needs it."""
    least_temperature: ClassVar[float] = 0.0
    """The engine raises lower temperatures (but 0) to this."""
    cpu_cache_gb: ClassVar[float | None] = None
    """Size of its cache that `auto` means on a CPU, in GiB; None: it has no limit."""

    def lack(self, feature: str) -> str | None:
        """Returns the text of the error for a run that needs one of ENGINE_FEATURES; None if the engine has it."""
        return self.unsupported.get(feature)

    def computes_like_trainer(self) -> bool:
        """True if log-probs are the trainer's up to rounding in the type of `trainer.precision`."""
        return False

    def reader_python(self) -> Path | None:
        """The Python of a process of the engine's own that reads shared weights; None if it has no such process."""
        return None

    def settled(self, cache_gb: float | None) -> Self:
        """Returns the engine with this size of its cache in place of `auto`; None leaves it."""
        given = getattr(self, "cache_gb", None)
        return self if given != "auto" or cache_gb is None else self.model_copy(update={"cache_gb": cache_gb})


class NativeEngineConfig(EngineSection):
    """rollmill's own engine, in the trainer's process and with the trainer's parameters."""

    implementation = "rollmill.engines.native.build:build_native"
    name: Literal["native"] = "native"
    after_update: Literal["recompute", "keep"] = "recompute"
    """KV cache of unfinished completions after a weight update. `recompute`: rebuild it, so that every later token
    follows the new weights exactly. `keep`: keep the entries of the old weights, which saves that time; later tokens
    come from the new weights but attend to old keys and values. Either way a token's log-prob is that of the
    distribution it was sampled from."""
    weights: Literal["int8"] | None = None
    """`int8`: linear layers multiply in 8 bits, with a scale per output channel and per token; rounded again after each
    update. On CPUs with VNNI. Rollouts are faster where products take most of the time, and tokens come from a slightly
    different policy: list `corrections`."""
    cache_gb: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Limit of the KV cache, in GiB, finished turns included. Completions that do not fit wait, the newest first, and
    are recomputed later: their tokens are the same. `auto`: on a GPU what the trainer leaves,
    and at most what all completions at a time need; on a CPU no limit."""
    prefix_cache_gb: float = Field(1.0, ge=0)
    """Memory (GiB) for keys and values of finished turns, until the next weight update: the next turn of the same
    conversation starts from them. 0 computes every turn from its beginning."""

    def computes_like_trainer(self) -> bool:
        """False with rounded weights, or keys and values of older ones."""
        return self.weights is None and self.after_update == "recompute"


_NATIVE = "use engine `native`, or remove this"
_OWN = {
    "model": "the policy",
    "tokenizer": "the policy's",
    "skip_tokenizer_init": "true: rollmill has the tokenizer",
    "dtype": "trainer.precision",
    "load_format": "dummy: weights come from the trainer",
    "max_model_len": "the policy's context",
    "max_num_seqs": "rollout.max_sequences",
    "max_num_batched_tokens": "rollout.prefill_tokens",
    "kv_cache_memory_bytes": "engine.cache_gb",
    "enforce_eager": "engine.compile",
    "logprobs_mode": "processed_logprobs",
    "worker_extension_cls": "rollmill's",
    "enable_sleep_mode": "engine.sleep",
}
"""vLLM arguments that rollmill sets itself, with their source."""


class VLLMEngineConfig(EngineSection):
    """vLLM in a separate process, which receives the trainer's weights after every step."""

    implementation = "rollmill.engines.vllm.build:build_vllm"
    unsupported = {
        "ngram_draft": "engine `vllm` has speculative decoding of its own (engine.options.speculative_config); remove "
        "this, or use engine `native`",
        "reuse": f"engine `vllm` takes no drafts; {_NATIVE}",
        "router_replay": f"engine `vllm` does not say which experts it chose; {_NATIVE}",
    }
    least_temperature = 0.01
    cpu_cache_gb = 2.0
    name: Literal["vllm"] = "vllm"
    python: Path | None = None
    """Python interpreter that has vLLM, such as .venv-vllm/bin/python. Default: the one that runs rollmill."""
    cache_gb: AutoSize = _CHOSEN
    """Size of the KV cache, in GiB. `auto`: 2 on a CPU; on a GPU what the trainer leaves, and at most what all
    completions at a time need."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model (and capture CUDA graphs): slower start, faster decoding. `auto`: on GPUs only."""
    sleep: bool = False
    """Free the GPU memory of weights and KV cache while the trainer works, which may then share the GPU (vLLM's sleep
    mode). On GPUs only, and with max_staleness 0, in one process."""
    gpus: list[int] | None = Field(None, min_length=1)
    """GPUs of this host for vLLM alone, such as [1], or [2, 3], over which it splits the model (tensor parallelism,
    unless `options` say otherwise). They are numbered as CUDA shows them to the run. Default: the trainer's GPU, which
    both share."""
    options: dict[str, Any] = {}
    """Additional arguments of vLLM's `AsyncEngineArgs`, such as quantization."""
    deadline_s: float = Field(600.0, gt=0)
    """Timeout for the process to start, or to load new weights."""
    restarts: int = Field(2, ge=0)
    """Maximum restarts of a crashed process per stage. Its requests start over, with the same seeds."""

    def lack(self, feature: str) -> str | None:
        """See EngineSection.lack."""
        if feature == "truncation" and "speculative_config" in self.options:
            return f"with speculative_config vLLM does not say how much probability truncation keeps; {_NATIVE}"
        return super().lack(feature)

    def reader_python(self) -> Path:
        return self.python or Path(sys.executable)

    def computes_like_trainer(self) -> bool:
        """False with rounded weights, or rounded keys and values."""
        return not self.options.keys() & {"quantization", "kv_cache_dtype"}

    def conflicts(self) -> dict[str, str]:
        if self.gpus is None:
            return {}
        if len(set(self.gpus)) < len(self.gpus) or min(self.gpus) < 0:
            return {"gpus": f"{self.gpus} are no different GPUs; give each once, counted from 0"}
        if self.sleep:
            return {"gpus": "vLLM sleeps to leave a GPU to the trainer, and has GPUs of its own here; remove `sleep`"}
        return {}

    @field_validator("options")
    @classmethod
    def _leaves_the_rest_to_other_keys(cls, options: dict[str, Any]) -> dict[str, Any]:
        for key in options:
            if key in _OWN:
                raise ValueError(f"{key} is no option: it is {_OWN[key]}; remove it")
        return options


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
    _engines = section_union(module_sections(__name__, EngineSection), kind="engine")
    EngineConfig = Annotated[_engines, BeforeValidator(_gives_tokens)]
