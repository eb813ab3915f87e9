"""Configuration files, for syshaxd and syshax-api alike: TOML layers, one frozen pydantic model, errors that help.

It owns reading, merging and the words of every configuration error: file, key, value seen, nearest valid key. It
knows no option: those are rows of the models in `syshaxd.config` and `syshaxd.frontend.config`. One field is one row
and feeds the check, the example file in etc/ and the documentation, so that the three cannot disagree.
"""

from __future__ import annotations

import difflib
import textwrap
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ByteSize, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from syshax.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
_MAX_ERRORS = 8
_VALUE_CHARS = 80
_EXAMPLE_COLUMNS = 100
_UNITS = (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))


class Settings(BaseModel):
    """Base of every table of a configuration file: frozen, and a key that it does not name is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


@dataclass(frozen=True)
class Layer:
    """Values from one source: a file's path, "command line", "state". Later layers win, key by key."""

    source: str
    values: Mapping[str, Any]


def read_toml(path: Path) -> Layer:
    """The file as a layer. `ConfigError` when it is absent, unreadable, not UTF-8, or not TOML (with the line)."""
    try:
        with path.open("rb") as file:
            return Layer(str(path), tomllib.load(file))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file", "check the path given with --config") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "the file must be readable by the user that runs this") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        last = len(path.read_bytes().splitlines())
        reason = str(error).replace("(at end of document)", f"(at line {last}, the end)")
        raise ConfigError(f"{path}: not valid TOML: {reason}", "strings need quotes; tables are [name]") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}", "TOML files are UTF-8") from None


def with_drop_ins(path: Path) -> list[Path]:
    """The file (where it exists), then FILE.d/*.toml by name, as systemd does: later ones win, key by key."""
    return [*([path] if path.exists() else []), *sorted(Path(f"{path}.d").glob("*.toml"))]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf; an empty table is a leaf."""
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{dotted}.")
        else:
            yield dotted, value


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = _copy(value)


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def build(model: type[M], layers: Sequence[Layer]) -> tuple[M, dict[str, str]]:
    """The checked settings, and dotted key -> source for every key that a layer set.

    `ConfigError` with one line for every fault (at most 8): source, key, what is wrong, the value seen; its hint
    names the nearest valid key of an unknown one.
    """
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        _merge(merged, layer.values)
        for key, _ in flatten(layer.values):
            sources = {known: source for known, source in sources.items() if not known.startswith(f"{key}.")}
            sources[key] = layer.source
    try:
        return model.model_validate(merged), sources
    except ValidationError as error:
        raise _explain(model, error, sources) from None


def _explain(model: type[BaseModel], error: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    details = error.errors(include_url=False)
    lines: list[str] = []
    hints: list[str] = []
    for detail in details[:_MAX_ERRORS]:
        line, hint = _explain_one(model, detail, sources)
        lines.append(line)
        if hint and hint not in hints:
            hints.append(hint)
    if len(details) > _MAX_ERRORS:
        lines.append(f"and {len(details) - _MAX_ERRORS} more")
    return ConfigError("\n".join(lines), "; ".join(hints))


def _explain_one(model: type[BaseModel], detail: ErrorDetails, sources: Mapping[str, str]) -> tuple[str, str]:
    loc = [part for part in detail["loc"] if part != "[key]"]
    key = dotted_key(loc)
    source = _source_of(key, sources)
    where = f"{source}: {key}" if key else source
    if detail["type"] == "extra_forbidden":
        near = nearest_key(model, loc)
        return f"{where}: unknown key", f"nearest valid key: {near}" if near else ""
    if detail["type"] == "missing":
        return f"{where}: this key is required", ""
    if detail["type"] in ("model_type", "dict_type"):
        return f"{where}: expected a table, [{key}] (value: {detail['input']!r})", ""
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    seen = repr(detail["input"])
    seen = seen if len(seen) <= _VALUE_CHARS else f"{seen[:_VALUE_CHARS]}…"
    return f"{where}: {message[:1].lower()}{message[1:]} (value: {seen})", ""


def dotted_key(loc: Sequence[int | str]) -> str:
    """("models", "qwen3", "path") -> models.qwen3.path; a list's index is written [0]."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _source_of(key: str, sources: Mapping[str, str]) -> str:
    """Who set the key; for a key that nobody set, who set something above, beneath or nearest beside it."""
    for known, source in sources.items():
        if key == known or key.startswith((f"{known}.", f"{known}[")) or known.startswith(f"{key}."):
            return source
    table = key.rpartition(".")[0]
    if table:
        return _source_of(table, sources)
    return next(iter(dict.fromkeys(sources.values())), "configuration")


def nearest_key(model: type[BaseModel], loc: Sequence[int | str]) -> str:
    """The valid key most like `loc`, as a dotted key: first in the same table, then the same name in any table."""
    name = str(loc[-1])
    table = _table_at(model, loc[:-1])
    if table is not None and (near := difflib.get_close_matches(name, table.model_fields, n=1, cutoff=0.5)):
        return dotted_key([*loc[:-1], near[0]])
    everywhere = list(valid_keys(model))
    same_name = [key for key in everywhere if key.rsplit(".", 1)[-1] == name]
    near = same_name or difflib.get_close_matches(dotted_key(loc), everywhere, n=1, cutoff=0.5)
    return near[0] if near else ""


def valid_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key; a free name, as in [models.NAME], is written NAME."""
    for name, field in model.model_fields.items():
        inner, free = _inner_table(field.annotation)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from valid_keys(inner, f"{prefix}{name}.{'NAME.' if free else ''}")


def _table_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel] | None:
    table: type[BaseModel] | None = model
    skip = False
    for part in loc:
        if skip:
            skip = False
            continue
        if table is None or str(part) not in table.model_fields:
            return None
        table, skip = _inner_table(table.model_fields[str(part)].annotation)
    return table


def _inner_table(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The table that a field holds, and whether it holds many under free names or indices."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _inner_table(args[0])
    if origin in (dict, list, tuple) and args:
        return _inner_table(args[1] if origin is dict and len(args) > 1 else args[0])[0], True
    if origin in (Union, types.UnionType):
        return next((found for arg in args if (found := _inner_table(arg))[0] is not None), (None, False))
    return None, False


def example_toml(model: type[BaseModel], heading: str = "") -> str:
    """The commented example file: every key with its description and, commented out, its default.

    Where a key has no default worth showing, an example: those of a free table (`[aliases]`) and of a group.
    """
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    lines += _example_table(model, "")
    return "\n".join(lines).strip() + "\n"


def _example_table(model: type[BaseModel], table: str) -> list[str]:
    lines: list[str] = []
    tables: list[str] = []
    for name, field in model.model_fields.items():
        paragraphs = (field.description or "").splitlines()
        description = [f"# {line}" for paragraph in paragraphs for line in textwrap.wrap(paragraph, _EXAMPLE_COLUMNS)]
        inner, free = _inner_table(field.annotation)
        path = f"{table}.{name}" if table else name
        if inner is None and get_origin(field.annotation) is dict:
            rows = tomli_w.dumps(field.examples[0] if field.examples else {}).splitlines()
            tables += ["", *description, f"[{path}]", "", *(f"# {row}" for row in rows)]
        elif inner is not None:
            header = f"# [{path}.NAME]" if free else f"[{path}]"
            tables += ["", *description, header, *_example_table(inner, f"{path}.NAME" if free else path)]
        else:
            value = field.examples[0] if field.examples else field.get_default(call_default_factory=True)
            lines += ["", *description, f"# {_example_line(name, value)}"]
    return lines + tables


def _example_line(name: str, default: Any) -> str:
    if isinstance(default, BaseModel) or default is None or repr(default) == "PydanticUndefined":
        return f"{name} ="
    default = list(default) if isinstance(default, tuple) else default
    plain = default if isinstance(default, bool | int | float | list | str) else str(default)
    if isinstance(default, ByteSize):
        plain = next(
            (f"{default >> shift} {unit}" for unit, shift in _UNITS if default and not default % (1 << shift)), 0
        )
    if isinstance(plain, list):
        return f"{name} = [{', '.join(tomli_w.dumps({'x': item}).strip()[4:] for item in plain)}]"
    return tomli_w.dumps({name: plain}).strip()
