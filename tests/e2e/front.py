"""syshax-api before a real worker, for end-to-end tests: started, asked raw or through the official client, stopped."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from services import UnixConnection, WorkerServer, wait_until

from syshax.protocol import VIEW_SOCKET

TIMES = re.compile(rb'("(?:created|created_at|completed_at)": ?)[\d.]+')
MADE_IDS = re.compile(rb'"(?:chatcmpl-tool-|call_|fc_|msg_|rs_|resp_|item_)?[0-9a-f]{16,32}"')


def settled(answer: bytes) -> bytes:
    """An answer without what differs when the same is asked twice: times, and ids that no request id decides."""
    return MADE_IDS.sub(b'"ID"', TIMES.sub(rb"\g<1>0", answer))


class FrontEnd:
    """`syshax-api` with one worker on a Unix socket, told where the daemon shows its state."""

    def __init__(self, base: Path, worker: WorkerServer, runtime_dir: Path) -> None:
        self.worker, self.log = worker, base / "api.log"
        config = base / "api.toml"
        config.write_text(f'[daemon]\nview_socket = "{runtime_dir / VIEW_SOCKET}"\n')
        command = [sys.executable, "-m", "syshaxd.frontend", "--config", str(config), "--port", "0"]
        command += ["--worker", f"unix:{worker.socket}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(lambda: "listening on " in self.log.read_text(), 60, "syshax-api listens")
        self.url = self.log.read_text().split("listening on ")[1].split()[0]

    def ready(self) -> dict[str, Any]:
        """What /ready answers, its status as `http`."""
        status, _, body = self.ask("GET", "/ready", None, {})
        answer: dict[str, Any] = json.loads(body)
        return answer | {"http": status}

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None, headers: dict[str, str], direct: bool = False
    ) -> tuple[int, str, bytes]:
        """(status, content type, body) through the front-end, or directly from the worker."""
        connection: http.client.HTTPConnection
        if direct:
            connection = UnixConnection(self.worker.socket, 120)
        else:
            connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=120)
        try:
            data = json.dumps(body) if body is not None else None
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, response.headers.get("Content-Type", ""), response.read()
        finally:
            connection.close()

    def stop(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
