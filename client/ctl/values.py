"""What the command line's words mean: KEY=VALUE pairs, default names, requests checked before they are sent."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from syshax.errors import InvalidArgumentError

M = TypeVar("M", bound=BaseModel)
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def assignments(words: Sequence[str]) -> dict[str, Any]:
    """["a.b=3", "c=text"] -> {"a.b": 3, "c": "text"}. Values are TOML; what is not is taken as a string."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.strip()
        if not equals or not _KEY.fullmatch(key):
            raise InvalidArgumentError(
                f"{word!r} is not KEY=VALUE", "for example: syshaxctl config set log.level=debug"
            )
        if key in values:
            raise InvalidArgumentError(f"{key} is given twice")
        values[key] = toml_or_text(text.strip())
    return values


def toml_or_text(text: str) -> Any:
    """A TOML value (true, 3, 1.5, "x", [1, 2]); any other text as it is."""
    try:
        parsed = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["x"] if set(parsed) == {"x"} and isinstance(parsed["x"], bool | int | float | str | list) else text


def default_name(path: Path) -> str:
    """A model's name from its directory: Qwen3-30B-A3B; from a Hugging Face cache's snapshot, the repository's name."""
    folder = path.absolute()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        name = folder.parents[1].name.rsplit("--", 1)[-1]
    else:
        name = folder.resolve().name if folder.name in (".", "..") else folder.name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:128]
    if not name:
        raise InvalidArgumentError(f"{path} gives no name for the model", "choose one with --name")
    return name


def request(model: type[M], **fields: Any) -> M:
    """The message, or InvalidArgumentError with the field's fault."""
    try:
        return model(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        hint = "a name has letters, digits, dots, dashes and underscores" if field == "name" else ""
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise InvalidArgumentError(f"{field} {first['input']!r}: {reason}", hint) from None
