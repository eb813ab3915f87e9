"""What can be asked of a running process, by its control socket, its supervisor or a signal."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from syshax.errors import ConfigError, InvalidArgumentError
from syshaxd.frontend.server import Server

log = logging.getLogger("syshax.api")


class Commands:
    """`do(name, ...)` for one server."""

    def __init__(self, server: Server) -> None:
        self._app = server.app
        self._table: dict[str, Callable[..., Awaitable[Any]]] = {"reload": self.reload}

    async def do(self, name: str, **fields: Any) -> Any:
        """The command's answer, made for JSON. Raises `SyshaxError`."""
        if name not in self._table:
            raise InvalidArgumentError(f"there is no command {name!r}")
        return await self._table[name](**fields)

    async def reload(self) -> int | None:
        """Reads the API keys again; their number, None without keys. `ConfigError`: the old ones stay."""
        keys = self._app.keys
        if keys is None:
            return None
        keys.reload()
        return len(keys)


async def reload_and_tell(reload: Callable[[], Awaitable[int | None]]) -> None:
    """What SIGHUP does, with its line in the log."""
    try:
        number = await reload()
    except ConfigError as error:
        log.error("SIGHUP: the old keys stay: %s", error)
    else:
        log.info("SIGHUP: %s", "nothing to reload, keys_file is not set" if number is None else f"{number} API keys")
