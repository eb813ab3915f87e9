"""What the ring's tests share: raw sessions whose every byte a test may write, and a small attach server.

Both stand on `_core.TestHarness`, a real dispatcher over a fake model, so that no kernels are needed. Run as a program
(`python ring_harness.py DIRECTORY`) it is a daemon of its own that tests may stop and kill.
"""

from __future__ import annotations

import array
import mmap
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import posix_ipc

from syshax.errors import FingerprintError, SyshaxError, UnknownModelError
from syshax.protocol import (
    ATTACH_SOCKET,
    AttachAnswer,
    AttachRequest,
    Dtype,
    ErrorAnswer,
    ErrorBody,
    Geometry,
    RingLayout,
)
from syshaxd import _core

ABI = _core.ring_abi()
STATUS: dict[str, int] = ABI["constants"]
LAYERS, EXPERTS, HIDDEN, TOP_K = 4, 8, 64, 2
SPIN_FIXED = 1 << 31  # or-ed to a spin_us: csrc/base/spin.h


def reference(
    layer: int, hidden_states: npt.NDArray[Any], topk_ids: npt.NDArray[Any], topk_weights: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """The fake model in numpy, in whole numbers: hidden_states as float32, float16 or uint16 for bfloat16."""
    width = np.uint32 if hidden_states.dtype.itemsize == 4 else np.uint16
    bits = topk_weights.astype(np.float32).view(np.uint32).astype(np.uint64)
    sums = (layer + ((topk_ids.astype(np.int64) + 1).astype(np.uint64) * bits).sum(axis=1)) & np.uint64(0xFFFFFFFF)
    words = np.ascontiguousarray(hidden_states).view(width).astype(np.uint64) + sums[:, None].astype(np.uint64)
    return words.astype(width).view(hidden_states.dtype)


def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
    """Waits until the condition holds and returns its value; fails the test when it never does."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
    return value


def shared_memory_of(runtime_dir: Path) -> list[str]:
    """What the daemon of that directory has left in /dev/shm."""
    return [entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith(runtime_dir.name)]


def descriptors() -> dict[int, str]:
    """Open descriptors of this process and what they are."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:
            continue  # the one that lists
    return found


class RawSession:
    """A session without a client: the test writes the shared memory itself, as a hostile client could."""

    def __init__(
        self,
        harness: _core.TestHarness,
        session_id: int,
        *,
        max_tokens: int = 16,
        top_k: int = TOP_K,
        element_bytes: int = 4,
        num_slots: int = 2,
        spin_us: int = 0,
        priority: int = 1,
        share: int = 0,
    ) -> None:
        self.harness, self.session_id, self.num_slots = harness, session_id, num_slots
        self.layout = harness.layout(max_tokens, top_k, element_bytes, num_slots)
        self.shm_fd = os.memfd_create("ring-test", os.MFD_CLOEXEC)
        os.ftruncate(self.shm_fd, self.layout["total_bytes"])
        self.doorbell_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.memory = mmap.mmap(self.shm_fd, self.layout["total_bytes"])
        harness.add_session(
            session_id, self.shm_fd, self.doorbell_fd, bytes(16), max_tokens, top_k, element_bytes, num_slots, spin_us,
            priority, share,
        )  # fmt: skip
        self.position = STATUS["first_position"]
        self.tag = STATUS["first_position"]

    def close(self) -> None:
        self.harness.remove_session(self.session_id)
        self.memory.close()
        os.close(self.shm_fd)
        os.close(self.doorbell_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _place(self, struct: str, name: str, index: int = 0) -> tuple[int, int]:
        start = {
            "syshax_ring_header": 0,
            "syshax_ring_request": self.layout["requests_offset"],
            "syshax_ring_completion": self.layout["completions_offset"],
        }[struct]
        offset, size = ABI[struct]["fields"][name]
        return start + index * ABI[struct]["size"] + offset, size

    def read(self, struct: str, name: str, index: int = 0) -> int:
        offset, size = self._place(f"syshax_ring_{struct}", name, index)
        return int.from_bytes(self.memory[offset : offset + size], "little", signed=name == "detail")

    def write(self, struct: str, name: str, value: int, index: int = 0) -> None:
        offset, size = self._place(f"syshax_ring_{struct}", name, index)
        self.memory[offset : offset + size] = (value % (1 << 8 * size)).to_bytes(size, "little")

    def area(self, slot: int, name: str, dtype: Any) -> npt.NDArray[Any]:
        """The rest of a slot from one of its areas on, as an array over the shared memory itself."""
        start = self.layout["slots_offset"] + slot * self.layout["slot_bytes"]
        offset = 0 if name == "hidden_states" else self.layout[f"{name}_offset"]
        count = (self.layout["slot_bytes"] - offset) // np.dtype(dtype).itemsize
        return np.frombuffer(self.memory, dtype, count, start + offset)

    def fill(
        self, slot: int, hidden_states: npt.NDArray[Any], ids: npt.NDArray[Any], weights: npt.NDArray[Any]
    ) -> None:
        for name, values in (("hidden_states", hidden_states), ("ids", ids), ("weights", weights)):
            self.area(slot, name, values.dtype)[: values.size] = values.ravel()

    def post(self, raw: bytes | None = None, **fields: int) -> int:
        """Publishes one descriptor (from fields, or 64 raw bytes) without looking at anything; returns its tag."""
        index = self.position % self.num_slots
        if raw is None:
            self.tag += 1
            if self.tag % (1 << 32) == 0:
                self.tag += 1
            offset, _ = self._place("syshax_ring_request", "tag", index)
            self.memory[offset : offset + 64] = bytes(64)
            for name, value in {"tag": self.tag, "num_tokens": 1, "top_k": TOP_K, **fields}.items():
                self.write("request", name, value, index)
        else:
            offset, _ = self._place("syshax_ring_request", "tag", index)
            self.memory[offset : offset + 64] = raw
        self.position += 1
        self.publish(self.position)
        return fields.get("tag", self.tag)

    def publish(self, tail: int) -> None:
        self.write("header", "submit_tail", tail)
        os.eventfd_write(self.doorbell_fd, 1)

    def completion(self, slot: int, tag: int, seconds: float = 5.0) -> dict[str, int]:
        eventually(lambda: self.read("completion", "state", slot) == tag % (1 << 32), seconds)
        return {
            name: self.read("completion", name, slot) for name in ("tag", "status", "detail", "detail2", "queued_ns")
        }

    def stats(self) -> dict[str, Any]:
        return next(entry for entry in self.harness.session_stats() if entry["session_id"] == self.session_id)

    def ask(self, slot: int, tokens: int, layer: int = 1, seed: int = 0) -> tuple[int, npt.NDArray[Any]]:
        """Publishes a random request; its tag and the right answer."""
        rng = np.random.default_rng([seed, self.session_id])
        x = rng.standard_normal((tokens, HIDDEN), dtype=np.float32)
        ids = rng.integers(-1, EXPERTS, (tokens, TOP_K)).astype(np.int32)
        weights = rng.random((tokens, TOP_K), dtype=np.float32)
        self.fill(slot, x, ids, weights)
        return self.post(slot=slot, layer=layer, num_tokens=tokens), reference(layer, x, ids, weights)

    def output(self, slot: int, tokens: int) -> npt.NDArray[Any]:
        return self.area(slot, "output", np.float32)[: tokens * HIDDEN].reshape(tokens, HIDDEN).copy()

    def works(self) -> None:
        """One right round trip; fails the test otherwise."""
        rng = np.random.default_rng(self.position)
        x = rng.standard_normal((3, HIDDEN), dtype=np.float32)
        ids = rng.integers(-1, EXPERTS, (3, TOP_K)).astype(np.int32)
        weights = rng.random((3, TOP_K), dtype=np.float32)
        self.fill(0, x, ids, weights)
        tag = self.post(slot=0, layer=1, num_tokens=3)
        assert self.completion(0, tag)["status"] == STATUS["OK"]
        got = self.area(0, "output", np.uint32)[: x.size].reshape(x.shape)
        np.testing.assert_array_equal(got, reference(1, x, ids, weights).view(np.uint32))
        del got


@dataclass
class FakeDaemon:
    """An attach socket in front of a TestHarness, with one model called "tiny"."""

    runtime_dir: Path
    num_layers: int = LAYERS
    num_experts: int = EXPERTS
    hidden_size: int = HIDDEN
    fingerprint: str = "f" * 64
    spin_us: int = 0
    boot_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    refuse_with: SyshaxError | None = None
    change_answer: Callable[[AttachAnswer], object] | None = None
    """What to send in place of the answer, for tests of a client that meets nonsense."""

    def __post_init__(self) -> None:
        self.harness = _core.TestHarness(self.num_layers, self.num_experts, self.hidden_size, TOP_K)
        self.harness.start()
        path = self.runtime_dir / ATTACH_SOCKET
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._connections: dict[int, socket.socket] = {}
        self._threads: list[threading.Thread] = []
        self._next_id = 1
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """As a daemon that ends: no more socket, every connection cut, the dispatcher stopped."""
        (self.runtime_dir / ATTACH_SOCKET).unlink(missing_ok=True)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        self.cut()
        time.sleep(0.05)  # a request that is held is lost before it is released
        self.harness.release()
        for thread in self._threads:
            thread.join()
        self.harness.stop()
        del self.harness  # its descriptors go with it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self) -> None:
        for connection in list(self._connections.values()):
            connection.shutdown(socket.SHUT_RDWR)

    def sessions(self) -> int:
        return len(self.harness.session_stats())

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            session_id, self._next_id = self._next_id, self._next_id + 1
            self._connections[session_id] = connection
            thread = threading.Thread(target=self._serve, args=(connection, session_id), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, session_id: int) -> None:
        attached = False
        try:
            request = AttachRequest.model_validate_json(connection.recv(65536))
            attached = self._attach(connection, session_id, request)
            while connection.recv(1):
                pass
        except SyshaxError as error:
            body = ErrorBody(code=error.code, message=error.message, hint=error.hint)
            connection.send(ErrorAnswer(error=body).model_dump_json().encode())
        except OSError:
            pass  # cut
        finally:
            if attached:
                self.harness.remove_session(session_id)
            del self._connections[session_id]
            connection.close()

    def _attach(self, connection: socket.socket, session_id: int, request: AttachRequest) -> bool:
        if self.refuse_with is not None:
            raise self.refuse_with
        if request.model != "tiny":
            raise UnknownModelError(f"there is no model {request.model!r}; this daemon has: tiny")
        if request.fingerprint not in (None, self.fingerprint):
            raise FingerprintError(f"the client's checkpoint is {request.fingerprint}, tiny's {self.fingerprint}")
        sizes = {
            "max_tokens": request.max_tokens,
            "top_k": request.top_k or TOP_K,
            "element_bytes": request.dtype.bytes,
            "num_slots": request.num_slots,
        }
        layout = self.harness.layout(**sizes)
        answer = AttachAnswer(
            boot_id=self.boot_id,
            session_id=session_id,
            model="tiny",
            format="q8_0",
            fingerprint=self.fingerprint,
            geometry=Geometry(
                num_layers=self.num_layers,
                num_experts=self.num_experts,
                hidden_size=self.hidden_size,
                intermediate_size=1,
                top_k=TOP_K,
                layer_ids=list(range(self.num_layers)),
            ),
            layout=RingLayout.model_validate(layout),
        )
        name = f"/{self.runtime_dir.name}-{session_id}"  # known, so that tests can look for what is left
        memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600, size=layout["total_bytes"])
        memory.unlink()
        doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self.harness.add_session(
                session_id, memory.fd, doorbell, bytes.fromhex(self.boot_id), spin_us=self.spin_us, **sizes
            )
            if self.change_answer is None:
                self._send(connection, answer.model_dump_json().encode(), [memory.fd, doorbell])
            else:
                self.change_answer(answer)
                self._send(connection, answer.model_dump_json().encode(), [memory.fd, doorbell])
        finally:
            memory.close_fd()
            os.close(doorbell)
        return True

    @staticmethod
    def _send(connection: socket.socket, data: bytes, passed: list[int]) -> None:
        connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))])


def batch(
    tokens: int, dtype: Dtype = Dtype.FLOAT32, seed: int = 0, hidden_size: int = HIDDEN
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """hidden_states (uint16 for bfloat16), topk_ids with some -1, topk_weights."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, hidden_size), dtype=np.float32)
    hidden = {
        Dtype.FLOAT32: x,
        Dtype.FLOAT16: x.astype(np.float16),
        Dtype.BFLOAT16: (x.view(np.uint32) >> 16).astype(np.uint16),
    }[dtype]
    ids = rng.integers(-1, EXPERTS, (tokens, TOP_K)).astype(np.int32)
    return hidden, ids, rng.random((tokens, TOP_K), dtype=np.float32)


def main() -> None:
    daemon = FakeDaemon(Path(sys.argv[1]))
    if "--hold" in sys.argv:
        daemon.harness.hold()
    print("ready", flush=True)
    signal.sigwait({signal.SIGTERM})
    daemon.close()


if __name__ == "__main__":
    main()
