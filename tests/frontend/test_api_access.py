"""API keys: every route but health is closed without one; the file's errors are told; nothing of a key is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from front_fixtures import Setup, error_of
from hypothesis import given
from hypothesis import strategies as st

from syshax.errors import ConfigError
from syshaxd.frontend.app import OPEN_PATHS, ROUTES
from syshaxd.frontend.keys import KeyRing

PATHS = [
    *ROUTES,
    "/",
    "/docs",
    "/v1",
    "/v1/models/m",
    "/v1/embeddings",
    "/v1/responses/x",
    "/v1//models",
    "/V1/models",
    "/health/",
    "/health/../v1/models",
    "/ready/x",
    "/metrics/",
    "/v1/load_lora_adapter",
]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# team one\nsk-one\n\n  sk-two   # team two\n")
    return path


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_every_route_but_health_asks_for_a_key(setup: Setup, key_file: Path, method: str) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, keys=key_file)
    for path in PATHS:
        for header in (None, "Bearer wrong", "Bearer ", "Basic sk-one", "sk-one", "Bearer sk-one x", "Bearer sk-on"):
            headers = {"Authorization": header} if header else {}
            response = await front.session.request(method, f"{front.url}{path}", headers=headers)
            if path in OPEN_PATHS:
                assert response.status in (200, 405)
            elif method == "HEAD":
                assert response.status == 401
            elif not path.startswith("/health/.."):
                assert response.headers["WWW-Authenticate"] == "Bearer"
                error = await error_of(response, 401, "invalid_api_key")
                assert "sk-" not in error["message"]
    assert {"/health", "/ready"} == OPEN_PATHS and not worker.seen


async def test_keys_open_every_route(setup: Setup, key_file: Path) -> None:
    worker = await setup.worker()
    front = await setup.front(worker, keys=key_file)
    for header in ("Bearer sk-one", "bearer sk-two", "Bearer  sk-two "):
        headers = {"Authorization": header}
        for path in ("/v1/models", "/metrics", "/v1/anything"):
            assert (await front.session.get(path, headers=headers)).status == 200
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert (await front.session.post(path, json={"model": "m"}, headers=headers)).status == 200


async def test_ready_names_workers_to_those_with_a_key(setup: Setup, key_file: Path) -> None:
    front = await setup.front(await setup.worker(), keys=key_file)
    assert "workers" not in await (await front.session.get("/ready")).json()
    with_key = await front.session.get("/ready", headers={"Authorization": "Bearer sk-one"})
    assert "workers" in await with_key.json()


async def test_reload_takes_new_keys_and_keeps_old_ones_on_a_fault(setup: Setup, key_file: Path) -> None:
    ring = KeyRing(key_file)
    key_file.write_text("new\n")
    ring.reload()
    assert ring.accepts("Bearer new") and not ring.accepts("Bearer sk-one")
    for text in ("", "two words\n"):
        key_file.write_text(text)
        with pytest.raises(ConfigError):
            ring.reload()
    key_file.unlink()
    with pytest.raises(ConfigError):
        ring.reload()
    assert ring.accepts("Bearer new") and len(ring) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no key"),
        (b"# only\n\n   # comments\n", "holds no key"),
        (b"fine\nsk one\n", "line 2 has 2 words"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_faults_of_the_file(tmp_path: Path, text: bytes | None, message: str) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        KeyRing(path)
    assert str(path) in caught.value.message and caught.value.hint and "sk" not in caught.value.message


def test_only_hashes_are_kept(key_file: Path) -> None:
    ring = KeyRing(key_file)
    assert "sk-one" not in repr(vars(ring)) and len(ring) == 2


keys = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=30).filter(
    lambda key: not key.startswith("#")
)


@given(known=st.lists(keys, min_size=1, max_size=5), offered=keys)
def test_a_key_is_accepted_when_it_is_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, known: list[str], offered: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "generated-keys"
    path.write_text("\n".join(known))
    ring = KeyRing(path)
    assert ring.accepts(f"Bearer {offered}") == (offered in known)
    assert all(ring.accepts(f"Bearer {key}") for key in known)
