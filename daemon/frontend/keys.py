"""API keys: read from a file, kept as keyed hashes only, compared in constant time, reloadable."""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

from syshax.errors import ConfigError


class KeyRing:
    """The keys of one file. A failed `reload` keeps the keys that were valid before."""

    def __init__(self, path: Path) -> None:
        """Reads the file; `ConfigError` when it cannot be read, holds no key or a line is not one word."""
        self._path = path
        self._secret = secrets.token_bytes(32)
        self._hashes: list[bytes] = []
        self.reload()

    def __len__(self) -> int:
        return len(self._hashes)

    def reload(self) -> None:
        """Reads the file again. Raises as the constructor does; the old keys then stay."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"keys_file {self._path}: {error.strerror}", "it must be readable by the user of syshax-api"
            ) from None
        except UnicodeDecodeError:
            raise ConfigError(f"keys_file {self._path}: not UTF-8 text", "one API key a line") from None
        self._hashes = [self._hash(key) for key in _parse(self._path, text)]

    def accepts(self, authorization: str | None) -> bool:
        """Whether an Authorization header carries one of the keys as a bearer token."""
        scheme, _, key = (authorization or "").partition(" ")
        offered = self._hash(key.strip())
        found = False
        for known in self._hashes:
            found |= hmac.compare_digest(known, offered)
        return found and scheme.lower() == "bearer"

    def _hash(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), "sha256")


def _parse(path: Path, text: str) -> list[str]:
    keys: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        comment = next((index for index, word in enumerate(words) if word.startswith("#")), len(words))
        if comment > 1:
            raise ConfigError(
                f"keys_file {path}: line {number} has {comment} words", "one API key a line; # begins a comment"
            )
        keys += words[:comment]
    if not keys:
        raise ConfigError(
            f"keys_file {path}: holds no key", "add one key a line, or leave keys_file empty to ask for none"
        )
    return keys
