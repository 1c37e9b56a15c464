"""The program of vLLM's process: requests in, completions out, as lines of JSON over a socket.

It imports only packages of vLLM's environment. The first line holds the settings. Then come `generate`, `abort`, `load`
(new weights), `sleep` (until the next `load`), `pause`, `resume` and `keep folder`, handled in order, so that requests
after a `load` are sampled with the new weights. When the socket is closed, the process stops itself and all of vLLM's
subprocesses.

    run as: python -m rollmill.engines.vllm.worker NUMBER_OF_THE_SOCKET
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import io
import json
import os
import shutil
import signal
import socket
import struct
import sys
import traceback
from typing import Any

MAX_LINE_BYTES = 1 << 28
_EXTENSION = "rollmill.engines.vllm.extension.SharedWeightsExtension"
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_PR_SET_PDEATHSIG = 1
_TRUNCATION = {"top_p", "top_k", "min_p"}
_KEEPS_QUIET = (
    "top_p, top_k and min_p need vLLM's first model runner and no speculative_config, or vLLM does not say how much "
    "probability they keep; remove VLLM_USE_V2_MODEL_RUNNER from the environment, or use engine `native`"
)
_OTHER_TOKENS = (
    "it writes other tokens for the pictures of a prompt than the checkpoint's processor in the trainer, so what it "
    "samples could not be learned from; use engine `native`"
)


class VLLMServer:
    """Serves the requests of one parent process."""

    def __init__(self, engine: Any, settings: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self._engine, self._writer = engine, writer
        self._weights, self._parts = settings["weights"], settings.get("parts", {})
        self._name = settings.get("name", "vLLM")
        self._paused = self._asleep = False
        self.reports_truncation = False  #: how much probability is kept
        self.keeps_folder = False  #: the parent starts another process there
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, **message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def handle(self, message: dict[str, Any]) -> None:
        """Handle one message of the parent."""
        kind, number = message["kind"], message["id"]
        if kind == "generate":
            if self._asleep:
                await self.load()
            for sample in message["samples"]:
                self._begin(self._generate(sample, message))
        elif kind == "abort":
            self._begin(self._engine.abort(str(number)))
        elif kind == "keep folder":
            self.keeps_folder = True
        elif kind == "load":
            await self._answer(number, self.load(message.get("version")))
        elif kind == "sleep":
            await self._answer(number, self._sleep())
        else:
            await self._answer(number, self._switch(paused=kind == "pause"))

    async def load(self, announced: int | None = None) -> tuple[int, str]:
        """Load the newest weights between two steps; running requests are kept and continue. Returns their version, and
        how they came: see `SharedWeightsExtension`."""
        engine = self._engine
        if self._asleep:
            await engine.wake_up(tags=["weights"])
        await engine.pause_generation(mode="keep", clear_cache=False)
        arguments = (self._weights, self._parts, announced, self._name)
        loaded = await engine.collective_rpc("load_shared_weights", args=arguments)
        version, how = loaded[0]
        await engine.update_weight_version(str(version))
        if self._asleep:
            await engine.wake_up(tags=["kv_cache"])
            self._asleep = False
        await engine.reset_prefix_cache(reset_running_requests=True)
        await engine.reset_encoder_cache()  # features of pictures
        await self._switch(self._paused)
        return int(version), how

    async def _sleep(self) -> None:
        """Free the memory of weights and KV cache until `load`, once no request is running."""
        await self._engine.sleep(level=2, mode="wait")
        self._asleep = True

    async def _switch(self, paused: bool) -> None:
        self._paused = paused
        if paused:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        else:
            await self._engine.resume_generation()

    async def _answer(self, number: int, work: Any) -> None:
        try:
            self.send(id=number, value=await work)
        except Exception as error:
            if self._engine.errored:
                raise
            self.send(id=number, error=f"{type(error).__name__}: {error}")

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End this process if vLLM's engine has died; its parent sees the log."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            terminate_process(1)

    async def _generate(self, sample: tuple[int, int, int, list[int]], message: dict[str, Any]) -> None:
        """Generate a completion: its number, its seed, the most tokens, and those that it continues."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        (number, seed, limit, begun), stream, top = sample, message["stream"], message["top"]
        truncated = not _TRUNCATION.isdisjoint(message["sampling"])
        if truncated and not self.reports_truncation:
            self.send(id=number, error=_KEEPS_QUIET)
            return
        params = SamplingParams(
            **message["sampling"],
            max_tokens=limit,
            seed=seed,
            ignore_eos=True,  # every id that ends a completion is among stop_token_ids
            logprobs=top,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )
        try:
            prompt: dict[str, Any] = {"prompt_token_ids": [*message.get("short", message["prompt"]), *begun]}
            if "pictures" in message:
                prompt["multi_modal_data"] = {"image": [_picture(each) for each in message["pictures"]]}
            async for output in self._engine.generate(prompt, params, str(number)):
                if "pictures" in message and output.prompt_token_ids != [*message["prompt"], *begun]:
                    raise ValueError(_OTHER_TOKENS)
                self._tell(number, output.outputs[0], top, truncated)
                await self._writer.drain()
                await asyncio.sleep(0)  # let messages of the parent be read
        except Exception as error:
            if self._engine.errored:
                raise
            self.send(id=number, error=f"{type(error).__name__}: {error.__cause__ or error}")

    def _tell(self, number: int, found: Any, top: int, truncated: bool) -> None:
        if found.finish_reason == "error":
            self.send(id=number, error="the request failed; see the log of vLLM's process")
            return
        message: dict[str, Any] = {"id": number, "tokens": list(found.token_ids)}
        logprobs = found.logprobs
        starts = [] if logprobs is None else logprobs.start_indices
        message["logprobs"] = [logprobs.logprobs[start] for start in starts]  # the sampled token's come first
        if truncated:  # see `TruncationSampler`
            bits = [logprobs.ranks[start] for start in starts]
            message["kept"] = struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))
        if top:
            spans = [(start + 1, start + 1 + top) for start in starts]
            message["top"] = [list(zip(logprobs.token_ids[a:b], logprobs.logprobs[a:b], strict=True)) for a, b in spans]
        if found.finish_reason is not None:
            message["ended"] = found.finish_reason
            message["versions"] = [(int(each.version), each.end - each.start) for each in found.weight_versions or []]
        self.send(**message)


def _picture(content: str) -> Any:
    """A picture from PNG as base64."""
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(content))).convert("RGB")


def start_engine(settings: dict[str, Any]) -> Any:
    """Create vLLM's engine with random weights."""
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    spawns = os.environ.get(_METHOD) == "spawn" or os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    options = {
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": _EXTENSION,
        "disable_log_stats": True,
    }
    args = AsyncEngineArgs(**{**options, **settings["arguments"]})
    config = args.create_engine_config()
    if current_platform.is_cpu() and not spawns:
        # vLLM spawns on CPUs, to bind threads to cores; forked processes need not import it again, which is most of a
        # start (17 s instead of 45)
        os.environ[_METHOD] = "fork"
    return AsyncLLM.from_vllm_config(
        config, enable_log_requests=args.enable_log_requests, disable_log_stats=args.disable_log_stats
    )


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. vLLM's engine outlives a killed parent otherwise: it
    keeps its memory, and nothing ever ends it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def terminate_process(code: int) -> None:
    """End this process and its subprocesses; Python's resource tracker stays until it has freed their shared memory."""
    sys.stderr.flush()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    os._exit(code)


async def serve(connection: socket.socket) -> None:
    """Start the engine by the settings in the first line, and serve until the parent closes the socket."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE_BYTES)
    settings = json.loads(await reader.readline())
    engine = start_engine(settings)
    server = VLLMServer(engine, settings, writer)
    server.reports_truncation = all(await engine.collective_rpc("report_truncation"))
    server.send(id=0, value=(await server.load())[0])
    while line := await reader.readline():
        await server.handle(json.loads(line))
    engine.shutdown()
    if not server.keeps_folder:
        shutil.rmtree(settings["folder"], ignore_errors=True)  # the parent may have been killed


if __name__ == "__mp_main__" and sys.platform == "linux":  # a subprocess of vLLM that was spawned, and not forked
    die_with_parent()

if __name__ == "__main__":
    if sys.platform == "linux":
        os.register_at_fork(after_in_child=die_with_parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            asyncio.run(serve(connection))
        except BaseException:
            traceback.print_exc()
            terminate_process(1)
        terminate_process(0)
