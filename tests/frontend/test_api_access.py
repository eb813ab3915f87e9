"""API keys: every route but health is closed without one; the file's errors are told; nothing of a key is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from front_fixtures import Setup, bearer, error_of, write_keys
from hypothesis import given
from hypothesis import strategies as st

from syshax.errors import ConfigError
from syshaxd.frontend.app import OPEN_PATHS, OPERATORS_PATHS, ROUTES
from syshaxd.frontend.keys import KeyRing, new_key

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
    return write_keys(tmp_path / "keys.toml", {"sk-one": {}, "sk-two": {"models": ["m"], "priority": "batch"}})


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
        for path in ("/v1/models", "/openapi.json", "/v1/anything"):
            assert (await front.session.get(path, headers=headers)).status == 200
        for path in ("/v1/chat/completions", "/v1/completions"):
            assert (await front.session.post(path, json={"model": "m"}, headers=headers)).status == 200


async def test_ready_names_workers_to_those_with_a_key(setup: Setup, key_file: Path) -> None:
    front = await setup.front(await setup.worker(), keys=key_file)
    assert "workers" not in await (await front.session.get("/ready")).json()
    assert "workers" in await (await front.session.get("/ready", headers=bearer("sk-one"))).json()


async def test_a_key_for_some_models_sees_nothing_of_the_others(setup: Setup, key_file: Path) -> None:
    front = await setup.front(await setup.worker("m", "n"), keys=key_file)
    for path in sorted(OPERATORS_PATHS):
        error = await error_of(await front.session.get(path, headers=bearer("sk-two")), 403, "insufficient_permissions")
        assert "`n`" not in error["message"]
        async with front.session.get(path, headers=bearer("sk-one")) as response:
            assert response.status == 200
    ready = await (await front.session.get("/ready", headers=bearer("sk-two"))).json()
    assert ready == {"status": "ready", "models": ["m"]}


def test_reload_takes_new_keys_and_keeps_old_ones_on_a_fault(key_file: Path) -> None:
    ring = KeyRing(key_file)
    write_keys(key_file, {"new": {}})
    ring.reload()
    assert ring.find("Bearer new") and not ring.find("Bearer sk-one")
    for text in ("", "two words\n", "[keys]\n", "[keys.a]\nsha256 = 'short'\n"):
        key_file.write_text(text)
        with pytest.raises(ConfigError):
            ring.reload()
    key_file.unlink()
    with pytest.raises(ConfigError):
        ring.reload()
    assert ring.find("Bearer new") and len(ring) == 1


HASH = "a" * 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "holds no key"),
        (b"# only\n\n   # comments\n", "holds no key"),
        (b"sk-secret\n", "not valid TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "no such file"),
        (b"keys = 'sk-secret'", "holds no key"),
        (b"[keys]\nteam = 'sk-secret'", "keys.team: is not a table"),
        (b"[keys.team]\nsha256 = 'sk-secret'", "keys.team.sha256: is not 64 hex"),
        (b"[keys.team]\nkey = 'sk-secret'", "keys.team.sha256: is not 64 hex"),
        (b"[keys.'a b']\nsha256 = 'sk-secret'", "the name of a key is 1 to 64"),
        (f"[keys.team]\nsha256 = '{HASH}'\nmodel = 'm'".encode(), "keys.team.model: unknown key"),
        (f"[keys.team]\nsha256 = '{HASH}'\nmodels = []".encode(), "keys.team.models: "),
        (f"[keys.team]\nsha256 = '{HASH}'\npriority = 'high'".encode(), "keys.team.priority: "),
        (f"[keys.team]\nsha256 = '{HASH}'\nrequests_per_minute = 0".encode(), "keys.team.requests_per_minute: "),
        (f"[keys.a]\nsha256 = '{HASH}'\n[keys.b]\nsha256 = '{HASH}'".encode(), "keys.b: is the same key as keys.a"),
    ],
)
def test_faults_of_the_file(tmp_path: Path, text: bytes | None, message: str) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        KeyRing(path)
    assert str(path) in caught.value.message and "secret" not in caught.value.message + caught.value.hint


def test_only_hashes_are_kept(key_file: Path) -> None:
    ring = KeyRing(key_file)
    assert ring.find("Bearer sk-one") and "sk-one" not in repr(vars(ring)) and len(ring) == 2


words = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=30)


@given(known=st.lists(words, min_size=1, max_size=5, unique=True), offered=words)
def test_a_key_is_found_when_it_is_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, known: list[str], offered: str
) -> None:
    path = write_keys(tmp_path_factory.getbasetemp() / "generated-keys", {key: {} for key in known})
    ring = KeyRing(path)
    assert (ring.find(f"Bearer {offered}") is not None) == (offered in known)
    found = [ring.find(f"Bearer {key}") for key in known]
    assert [key and key.name for key in found] == [f"key{number}" for number in range(len(known))]


async def test_new_key_makes_a_key_that_opens(setup: Setup, tmp_path: Path) -> None:
    one, lines = new_key("team-a", models=["m"], requests_per_minute=2, priority="batch")
    other, more = new_key("team-b")
    path = tmp_path / "keys.toml"
    path.write_text(lines + more)
    assert one != other and one not in lines and len(one) >= 50
    worker = await setup.worker("m", "n")
    front = await setup.front(worker, keys=path)
    for key, statuses in ((one, [200, 200, 429]), (other, [200] * 3)):
        assert [(await front.chat(key=key)).status for _ in statuses] == statuses
    with pytest.raises(ConfigError, match="1 to 64 letters"):
        new_key("team a")


async def test_a_key_sees_and_uses_its_models_alone(setup: Setup, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", {"few": {"models": ["a"]}, "alias": {"models": ["x"]}, "all": {}})
    worker = await setup.worker("a", "b")
    front = await setup.front(worker, keys=keys, aliases={"x": "b", "y": "a", "z": "gone"})

    async def models(key: str) -> list[str]:
        listed = await (await front.session.get("/v1/models", headers=bearer(key))).json()
        return [model["id"] for model in listed["data"]]

    assert await models("all") == ["a", "b", "x", "y"] and await models("few") == ["a", "y"]
    assert await models("alias") == ["x"]
    for key, open_, closed in (("few", "ay", "bx"), ("alias", "x", "aby"), ("all", "abxy", "")):
        for name in open_:
            assert (await front.chat(name, key=key)).status == 200
            assert (await front.session.get(f"/v1/models/{name}", headers=bearer(key))).status == 200
        for name in closed:
            error = await error_of(await front.chat(name, key=key), 404, "model_not_found")
            assert error["param"] == "model" and "`b`" not in error["message"].split("Known models")[1]
            await error_of(await front.session.get(f"/v1/models/{name}", headers=bearer(key)), 404, "model_not_found")
    assert {json.loads(seen.body)["model"] for seen in worker.seen} == {"a", "b"}


async def test_a_key_for_some_models_must_name_one_where_it_can_be_seen(setup: Setup, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", {"few": {"models": ["a"]}, "both": {"models": ["a", "b", "c"]}})
    worker = await setup.worker("a", "b")
    front = await setup.front(worker, keys=keys)

    async def status(key: str, body: bytes, path: str = "/v1/completions", **headers: str) -> int:
        return (await front.session.post(path, data=body, headers={**bearer(key), **headers})).status

    form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n'
    boundary = {"Content-Type": "multipart/form-data; boundary=x"}
    for key, refused in (("few", {400, 404}), ("both", {200})):
        assert await status(key, b"{}") in refused
        assert await status(key, b'{"model": 3}') in refused
        assert await status(key, b'{"model": "a", "model": "b"}') in refused
        assert await status(key, b'{"model": "a", "mod\\u0065l": "b"}') in refused
        assert await status(key, b'{"model": "a"}', **{"Content-Encoding": "gzip"}) in refused
        assert await status(key, b'{"model": "a"}', "/v1/other", **{"Content-Type": "text/plain"}) in refused
        assert await status(key, form % b"b" + b"--x--", "/v1/audio/transcriptions", **boundary) in refused
        twice = form % b"a" + form % b"b" + b"--x--"
        assert await status(key, twice, "/v1/audio/transcriptions", **boundary) in refused
        odd = (form % b"a" + form % b"b").replace(b'name="model"\r\n\r\nb', b"name=model\r\n\r\nb") + b"--x--"
        assert await status(key, odd, "/v1/audio/transcriptions", **boundary) in refused
        assert await status(key, b'{"model": "b", "model": "a"}') == 200
        assert await status(key, form % b"a" + b"--x--", "/v1/audio/transcriptions", **boundary) == 200


async def test_a_clients_key_stays_here_and_the_workers_own_is_sent(setup: Setup, key_file: Path) -> None:
    """Seen: keys of a gateway in the logs of the servers behind it; servers with a key that never became ready."""
    open_, closed, lost = await setup.worker("a"), await setup.worker("b"), await setup.worker("c")
    closed.key = lost.key = "sk-worker"
    secret = setup.folder / "worker.key"
    secret.write_text("sk-worker\n")
    groups = {"open": {"workers": [open_.url]}, "closed": {"workers": [closed.url], "key_file": str(secret)}}
    front = await setup.front(lost.url, keys=key_file, groups=groups)
    await front.until_ready(2)
    for name in ("a", "b"):
        assert (await front.chat(name, key="sk-one")).status == 200
    sent = [dict(worker.seen[0].headers).get("Authorization") for worker in (open_, closed)]
    assert sent == [None, "Bearer sk-worker"]
    reasons = {worker.url: worker.reason for worker in front.app.workers.all}
    assert "asks for another API key" in reasons[lost.url]
    open_front = await setup.front(open_)
    await open_front.chat("a", key="the-workers-business")
    assert dict(open_.seen[-1].headers)["Authorization"] == "Bearer the-workers-business"
