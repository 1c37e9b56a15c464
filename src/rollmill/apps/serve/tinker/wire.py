"""Requests and answers of tinker's clients as protocol buffers, by the messages of the package tinker."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tinker.proto import tinker_public_pb2 as pb

from rollmill.errors import RollmillError
from rollmill.types import FloatArray

Array = npt.NDArray[Any]
PROTOBUF = "application/x-protobuf"
_MOST_NUMBERS = 1 << 24  # of a tensor that is sent sparse: a few bytes could stand for any number
_TYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


class TinkerRequestError(RollmillError):
    """A request that its client must change."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One example of a forward pass: N input tokens, and arrays [N] by name, such as `target_tokens`; [N, K] with K
    targets at each place."""

    tokens: Array
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A request for log-probs and, unless `forward_only`, gradients."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    options: Mapping[str, float | str]
    forward_only: bool


def read_forward_request(raw: bytes) -> Any:
    """Parse the body of `forward_backward`, without its data. Raises TinkerRequestError if it is none."""
    from google.protobuf.message import DecodeError

    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise TinkerRequestError(f"the body is no ForwardBackwardRequest: {error}") from None
    return message


def decode_forward_request(message: Any) -> ForwardRequest:
    """Decode a request with its data. Raises TinkerRequestError for what is not supported, naming the datum."""
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        options[name] = value.text if value.WhichOneof("value") == "text" else value.number
    data = [_datum(each, number) for number, each in enumerate(message.data)]
    if not data:
        raise TinkerRequestError("the request has no data")
    return ForwardRequest(
        message.model_id, message.seq_id, data, message.loss_fn, options, forward_only=message.forward_only
    )


def _datum(message: Any, number: int) -> Datum:
    where = f"data[{number}]"
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise TinkerRequestError(f"{where}: only text is supported, not images or audio")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, where))
    tokens = np.concatenate([*parts, np.zeros(0, np.int32)])
    inputs = {name: _tensor(value, f"{where}.{name}") for name, value in message.loss_fn_inputs.items()}
    if not len(tokens):
        raise TinkerRequestError(f"{where} has no tokens")
    if "target_tokens" not in inputs:
        raise TinkerRequestError(f"{where} has no target_tokens")
    shape = inputs["target_tokens"].shape
    if len(shape) > 2 or 0 in shape or shape[0] != len(tokens):
        raise TinkerRequestError(
            f"{where}.target_tokens has the shape {list(shape)}, and the input {len(tokens)} tokens; give one row for "
            "each"
        )
    for name, value in inputs.items():
        if value.shape != shape:
            raise TinkerRequestError(
                f"{where}.{name} has the shape {list(value.shape)}, and target_tokens {list(shape)}; give as many"
            )
    return Datum(tokens, inputs)


def _tensor(message: Any, where: str) -> Array:
    kind = _TYPES.get(message.dtype)
    if kind is None:
        raise TinkerRequestError(f"{where} is of another type than float32 and int64")
    if message.WhichOneof("encoding") == "sparse_csr":
        return _dense(message, kind, where)
    found = _array(message.dense, kind, where)
    if message.shape:
        try:
            found = found.reshape(tuple(message.shape))
        except ValueError:
            raise TinkerRequestError(f"{where} has {found.size} numbers and the shape {list(message.shape)}") from None
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    return found


def _dense(message: Any, kind: Any, where: str) -> Array:
    """A sparse matrix in full, with 0 for what is left out."""
    shape, sparse = tuple(message.shape), message.sparse_csr
    values, columns = _array(sparse.values, kind, where), _array(sparse.col_indices, np.int64, where)
    counts = np.diff(_array(sparse.crow_indices, np.int64, where))
    right = len(shape) == 2 and 0 < shape[0] * shape[1] <= _MOST_NUMBERS and len(counts) == shape[0]
    if not right or (counts < 0).any() or not counts.sum() == len(columns) == len(values):
        raise TinkerRequestError(f"{where} is no sparse matrix in CSR format of at most {_MOST_NUMBERS} numbers")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise TinkerRequestError(f"{where} has a column outside of its shape {list(shape)}")
    found = np.zeros(shape, kind)
    found[np.repeat(np.arange(shape[0]), counts), columns] = values
    return found


def _array(raw: bytes, kind: Any, where: str) -> Array:
    if len(raw) % np.dtype(kind).itemsize:
        raise TinkerRequestError(f"{where}: {len(raw)} bytes are no whole number of {np.dtype(kind).name}")
    return np.frombuffer(raw, kind)


def encode_forward_result(logprobs: Sequence[FloatArray], metrics: Mapping[str, float]) -> bytes:
    """Encode the log-probs of every datum's target tokens, and metrics whose names end with how to reduce them."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for trailing, alike in itertools.groupby(logprobs, key=lambda each: each.shape[1:]):
        members = list(alike)
        column = pb.BatchedTensor(
            data=b"".join(each.tobytes() for each in members),
            offsets=np.cumsum([0, *(each.nbytes for each in members)], dtype=np.int64).tobytes(),
            dtype=pb.DTYPE_FLOAT32,
            trailing_shape=trailing,
        )
        message.loss_fn_outputs.add(type_tag="ArrayRecord", fields={"logprobs": column}, num_datums=len(members))
    return bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The K most probable tokens of N positions; both arrays are [N, K]."""

    ids: Array
    logprobs: Array

    def message(self) -> Any:
        """The message; K = 0 is none."""
        length, k = self.ids.shape
        return pb.TopkLogprobs(
            token_ids=self.ids.astype(np.int32).tobytes(),
            logprobs=self.logprobs.astype(np.float32).tobytes(),
            k=k,
            length=length,
        )


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled sequence. `stopped`: it ended by itself, not at its greatest length."""

    tokens: Array
    logprobs: Array
    stopped: bool
    top: TopLogprobs | None = None


def encode_samples(
    sequences: Sequence[Sampled], prompt_logprobs: FloatArray | None = None, top: TopLogprobs | None = None
) -> bytes:
    """Encode sampled sequences, and log-probs of the prompt's tokens (NaN where there is none)."""
    message = pb.SampleResponse()
    for each in sequences:
        added = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if each.stopped else pb.STOP_REASON_LENGTH,
            tokens=each.tokens.astype(np.int32).tobytes(),
            logprobs=each.logprobs.astype(np.float32).tobytes(),
        )
        if each.top is not None:
            added.topk_sampled_logprobs.CopyFrom(each.top.message())
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    if top is not None:
        message.topk_prompt_logprobs.CopyFrom(top.message())
    return bytes(message.SerializeToString())
