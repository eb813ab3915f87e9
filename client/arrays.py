"""Callers' arrays as the ring needs them: contiguous rows at an address, of a dtype that the ring has.

Owns the two libraries' differences (numpy, torch) so that nothing else asks which one it has. torch is imported by
whoever passes a tensor, never here. Raises InvalidArgumentError: the argument's name, what it is, what is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import numpy as np

from syshax.errors import InvalidArgumentError
from syshax.protocol import Dtype

Array = Any
"""numpy.ndarray or a torch.Tensor on the CPU."""


@functools.cache
def _is_torch_type(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "torch" for base in kind.__mro__)


def is_torch(array: Array) -> bool:
    """Also of subclasses that others derive from torch.Tensor."""
    return _is_torch_type(cast(Hashable, type(array)))


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_name(array: Array) -> str:
    return _name(array.dtype)


def _check_kind(array: Array, name: str, dimensions: int) -> None:
    if not is_torch(array) and not isinstance(array, np.ndarray):
        raise InvalidArgumentError(f"{name} is a {type(array).__name__}, not a numpy array or a torch tensor")
    if is_torch(array) and array.device.type != "cpu":
        raise InvalidArgumentError(f"{name} is on device {array.device}", f"pass {name}.cpu()")
    if len(array.shape) != dimensions:
        raise InvalidArgumentError(f"{name} has shape {list(array.shape)}, needed are {dimensions} dimensions")


class Rows(NamedTuple):
    """Rows at `address`, `row_bytes` each; `owner` keeps them alive."""

    owner: Array
    address: int
    row_bytes: int

    def row(self, index: int) -> int:
        """The address of one row."""
        return self.address + index * self.row_bytes


def _rows(array: Array) -> Rows:
    """Of a contiguous array of two dimensions."""
    if is_torch(array):
        return Rows(array, array.data_ptr(), array.shape[1] * array.element_size())
    return Rows(array, array.__array_interface__["data"][0], array.shape[1] * array.itemsize)


def _contiguous(array: Array) -> Array:
    return array.detach().contiguous() if is_torch(array) else np.ascontiguousarray(array)


class Batch(NamedTuple):
    """One call's input, checked: every area is contiguous, ids are int32, weights float32."""

    num_tokens: int
    top_k: int
    dtype: Dtype
    hidden_states: Rows
    topk_ids: Rows
    topk_weights: Rows


def batch(hidden_states: Array, topk_ids: Array, topk_weights: Array, hidden_size: int, num_experts: int) -> Batch:
    _check_kind(hidden_states, "hidden_states", 2)
    num_tokens, width = hidden_states.shape
    if width != hidden_size:
        raise InvalidArgumentError(f"hidden_states has {width} columns, the model's hidden_size is {hidden_size}")
    try:
        dtype = Dtype(_dtype_name(hidden_states))
    except ValueError:
        raise InvalidArgumentError(
            f"hidden_states is {_dtype_name(hidden_states)}, the ring carries {', '.join(Dtype)}", "convert it first"
        ) from None
    for name, array in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        _check_kind(array, name, 2)
        if array.shape[0] != num_tokens:
            raise InvalidArgumentError(f"{name} has {array.shape[0]} rows, hidden_states has {num_tokens}")
    if topk_ids.shape[1] != topk_weights.shape[1]:
        raise InvalidArgumentError(
            f"topk_ids has {topk_ids.shape[1]} columns and topk_weights {topk_weights.shape[1]}; both are top_k"
        )
    return Batch(
        num_tokens,
        topk_ids.shape[1],
        dtype,
        _rows(_contiguous(hidden_states)),
        _rows(_int32(topk_ids, num_experts)),
        _rows(_float32(topk_weights)),
    )


def _int32(ids: Array, num_experts: int) -> Array:
    """As int32; the daemon checks int32 ids, wider ones are checked here before they are cut."""
    if _dtype_name(ids) == "int32":
        return _contiguous(ids)
    values = ids.detach().numpy() if is_torch(ids) else ids
    if values.dtype.kind not in "iu":
        raise InvalidArgumentError(f"topk_ids is {_dtype_name(ids)}, needed are integers")
    if values.size and (int(values.min()) < -1 or int(values.max()) >= num_experts):
        wrong = (values >= num_experts) | ((values < -1) if values.dtype.kind == "i" else False)
        token, k = (int(index) for index in np.argwhere(wrong)[0])
        raise bad_expert_id(int(values[token, k]), token, k, num_experts)
    return np.ascontiguousarray(values, dtype=np.int32)


def bad_expert_id(value: int, token: int, k: int, num_experts: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"topk_ids[{token}, {k}] is {value}; allowed are 0 to {num_experts - 1}, and -1 for no expert"
    )


def _float32(weights: Array) -> Array:
    if _dtype_name(weights) == "float32":
        return _contiguous(weights)
    if is_torch(weights):
        if not weights.is_floating_point():
            raise InvalidArgumentError(f"topk_weights is {_dtype_name(weights)}, needed is float32")
        return weights.detach().float().contiguous()
    if weights.dtype.kind != "f":
        raise InvalidArgumentError(f"topk_weights is {weights.dtype}, needed is float32")
    return np.ascontiguousarray(weights, dtype=np.float32)


class Output(NamedTuple):
    """Where a result goes: `rows` to be filled, then `finish()` for what the caller gets."""

    rows: Rows
    target: Array

    def finish(self) -> Array:
        if self.target is not self.rows.owner:
            self.target[...] = self.rows.owner  # the caller's own array was not contiguous
        return self.target


def output_like(hidden_states: Array, out: Array | None) -> Output:
    """A new array of hidden_states' library, shape and dtype, or the caller's, checked to be such."""
    if out is None:
        new = _empty_like(hidden_states)
        return Output(_rows(new), new)
    if is_torch(out) != is_torch(hidden_states) or not hasattr(out, "dtype"):
        raise InvalidArgumentError(f"out is a {type(out).__name__}, hidden_states a {type(hidden_states).__name__}")
    _check_kind(out, "out", 2)
    if tuple(out.shape) != tuple(hidden_states.shape) or out.dtype != hidden_states.dtype:
        raise InvalidArgumentError(
            f"out is {_dtype_name(out)} {list(out.shape)}, "
            f"the result is {_dtype_name(hidden_states)} {list(hidden_states.shape)}"
        )
    if not is_torch(out) and not out.flags.writeable:
        raise InvalidArgumentError("out is read-only")
    if out.is_contiguous() if is_torch(out) else out.flags.c_contiguous:
        return Output(_rows(out), out)
    return Output(_rows(_empty_like(hidden_states)), out)


def _empty_like(array: Array) -> Array:
    if is_torch(array):
        return array.new_empty(tuple(array.shape), requires_grad=False)
    return np.empty(array.shape, dtype=array.dtype)
