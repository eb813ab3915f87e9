"""Bodies: only `model` and `priority` change, byte for byte; what a body says is what a JSON parser says."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from syshaxd.frontend.bodies import Body, Form, read
from syshaxd.frontend.errors import ApiError

JSON = {"Content-Type": "application/json"}
CHAT = "/v1/chat/completions"

spaces = st.text(" \t\n\r", max_size=3)
names = st.sampled_from(["model", "priority", "messages", "Model", "model ", "x", '"', "\\", "é", "\ud83d\ude00", ""])
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
odd = st.sampled_from(
    [
        "1e999",
        "-0.0",
        "123456789012345678901234567890",
        "1.000",
        "NaN",
        r'"\/\b\u00e9\ud83d\ude00"',
        '"{\\"model\\":[}"',
    ]
)


@st.composite
def written(draw: st.DrawFn, value: Any) -> str:
    """One of the many texts of a value: its spaces and escapes differ."""
    text = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 0, 1])))
    return text.encode("utf-8", "replace").decode()


@st.composite
def name_texts(draw: st.DrawFn, name: str) -> str:
    """A member's name, some of its letters escaped."""
    if draw(st.booleans()):
        return json.dumps(name)
    return '"' + "".join(f"\\u{ord(char):04x}" for char in name if ord(char) < 0x10000) + '"'


@st.composite
def objects(draw: st.DrawFn) -> list[tuple[str, str]]:
    """An object's members as (name's text, value's text), with the spaces that surround them."""
    members = []
    for name in draw(st.lists(names, max_size=6)):
        value = draw(odd) if draw(st.booleans()) else draw(written(draw(plain)))
        members.append((draw(name_texts(name)), draw(spaces) + value + draw(spaces)))
    return members


def joined(members: list[tuple[str, str]], around: list[str]) -> bytes:
    text = ",".join(f"{around[0]}{name}{around[1]}:{value}" for name, value in members)
    return f"{around[2]}{{{text}{around[0]}}}{around[1]}".encode()


def as_written(value: str, new: str) -> str:
    """`new` in the place of a value, the spaces around it as they were."""
    inner = value.strip(" \t\n\r")
    start = value.index(inner)
    return value[:start] + new + value[start + len(inner) :]


@given(
    objects(),
    st.lists(spaces, min_size=3, max_size=3),
    st.none() | st.text(min_size=1, max_size=5),
    st.none() | st.integers(0, 20),
)
@example(members=[], around=["", "", ""], model=None, priority=10)
@example(members=[('"model"', '"a"'), ('"mod\\u0065l"', '"b"')], around=["", "", ""], model="c", priority=0)
def test_only_the_two_fields_change(
    members: list[tuple[str, str]], around: list[str], model: str | None, priority: int | None
) -> None:
    """The reference builds the document again from its pieces, with other values in the places of the old ones."""
    raw = joined(members, around)
    new = {"model": model, "priority": priority}
    expected = [
        (name, value if new.get(key := json.loads(name)) is None else as_written(value, json.dumps(new[key])))
        for name, value in members
    ]
    changed = read(CHAT, JSON, raw).changed(model, priority)
    if priority is None or any(json.loads(name) == "priority" for name, _ in members):
        assert changed == joined(expected, around)
    else:
        insert = f'"priority":{priority}' + ("," if members else "")
        head = around[2].encode() + b"{"
        assert changed == head + insert.encode() + joined(expected, around)[len(head) :]

    def others(text: bytes) -> str:
        found = json.loads(text, parse_float=str, parse_int=str, parse_constant=str)
        return repr({name: value for name, value in found.items() if new.get(name) is None})

    assert others(changed) == others(raw)
    after = json.loads(changed)
    assert priority is None or after["priority"] == priority
    assert model is None or after.get("model", model) == model


@given(objects(), st.lists(spaces, min_size=3, max_size=3))
def test_the_model_is_what_a_parser_finds(members: list[tuple[str, str]], around: list[str]) -> None:
    raw = joined(members, around)
    model = json.loads(raw).get("model")
    body = read(CHAT, JSON, raw)
    assert body.model == (model if isinstance(model, str) else None)
    assert body.changed(None, None) is raw


roles = st.lists(st.sampled_from(["system", "developer", "assistant", "tool"]), max_size=3)
contents = st.text(max_size=12) | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=8)})
)


@given(before=roles, texts=st.lists(contents, min_size=6, max_size=6), extra=st.booleans(), compact=st.booleans())
def test_a_conversation_begins_alike_however_long_it_gets(
    before: list[str], texts: list[Any], extra: bool, compact: bool
) -> None:
    def beginning(messages: list[Any]) -> bytes:
        body = {"model": "m", **({"x": {"messages": 1}} if extra else {}), "messages": messages, "seed": len(messages)}
        raw = json.dumps(body, separators=(",", ":") if compact else None).encode()
        return read(CHAT, JSON, raw).beginning(CHAT, 256)

    first = [{"role": role, "content": text} for role, text in zip([*before, "user"], texts, strict=False)]
    more = [{"role": role, "content": text} for role, text in zip(["assistant", "user"], texts[4:], strict=True)]
    assert beginning(first) == beginning(first + more[:1]) == beginning(first + more) != b""


@given(one=st.text(min_size=1, max_size=300), other=st.text(min_size=1, max_size=300))
def test_what_users_say_first_tells_conversations_apart(one: str, other: str) -> None:
    def beginning(text: str) -> bytes:
        messages = [{"role": "system", "content": "s" * 9000}, {"role": "user", "content": text}]
        return read(CHAT, JSON, json.dumps({"messages": messages}).encode()).beginning(CHAT, 256)

    alike = one.partition("}")[:2] == other.partition("}")[:2]
    assert (beginning(one) == beginning(other)) == alike
    assert len(beginning(one)) <= 8192


def test_what_else_a_request_may_begin_with() -> None:
    def beginning(path: str, **body: Any) -> bytes:
        return read(path, JSON, json.dumps(body).encode()).beginning(path, 16)

    long = "a" * 40
    assert beginning("/v1/completions", prompt=long, seed=1) == beginning("/v1/completions", prompt=long + "b", seed=2)
    assert beginning("/v1/completions", prompt="one", seed=1) == beginning("/v1/completions", prompt="one", seed=2)
    assert beginning("/v1/completions", prompt="one") != beginning("/v1/completions", prompt="two")
    listed = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for path, text, messages in (("/v1/responses", "instructions", "input"), ("/v1/messages", "system", "messages")):
        one = beginning(path, **{text: "be brief", messages: listed})
        assert one == beginning(path, **{text: "be brief", messages: listed[:1]}) != b""
        assert one != beginning(path, **{text: "be long", messages: listed})
    assert beginning("/v1/responses", input="hi") != beginning("/v1/responses", input="ho")
    for path in ("/v1/embeddings", "/v1/chat/completions", "/v1/completions"):
        assert beginning(path, input="x") == b""
    for raw in (b"[1]", b'{"prompt":null}', b'{"prompt":"', b'"prompt"'):
        assert len(Body(raw, Form.JSON, None, "").beginning("/v1/completions", 16)) <= len(raw)


@pytest.mark.parametrize("filler", [b'"' + b"x" * 100_000 + b'"', b'"' + b"\\u0041" * 9999 + b'"', b"9" * 99_999])
@pytest.mark.parametrize("members", [b'"model":"m"', b'"model":"m","model":"m"'])
def test_a_large_body_costs_what_its_length_says(filler: bytes, members: bytes) -> None:
    raw = (
        b'{"x":['
        + b",".join([filler] * ((8 << 20) // len(filler)))
        + b'],"messages":[{"role":"user"}],'
        + members
        + b"}"
    )
    body = Body(raw, Form.JSON, "m", "")
    start = time.process_time()
    assert body.changed("n", None).endswith(members.replace(b'"m"', b'"n"') + b"}")
    assert body.beginning(CHAT, 256) == b'"messages":[{"role":"user"}'
    assert time.process_time() - start < 1


@pytest.mark.parametrize("filler", [b"[[],{}]", b"{}", b"[" * 100 + b"]" * 100, b'""', b'"\\"{}[]"'])
def test_a_hostile_body_is_given_up_early(filler: bytes) -> None:
    array = b"[" + b",".join([filler] * ((4 << 20) // len(filler))) + b"]"
    for raw in (
        b'{"x":%b,"messages":[{"role":"user"}],"mod\\u0065l":"m"}' % array,
        b'{"messages":%b,"model":"m","model":"m"}' % array,
        b"{" + b'"model":{},' * 500_000 + b'"model":"m"}',
    ):
        body = Body(raw, Form.JSON, "m", "")
        start = time.process_time()
        assert len(body.beginning(CHAT, 256)) <= 8192
        with pytest.raises(ApiError, match="nested"):
            body.changed("n", None)
        assert body.changed(None, None) is raw
        assert time.process_time() - start < 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_body_in_another_encoding_passes_but_takes_no_alias(encoding: str) -> None:
    raw = '{"model": "m"}'.encode(encoding)
    body = read(CHAT, JSON, raw)
    assert body.model == "m" and body.changed(None, None) == raw and body.beginning(CHAT, 16) == b""
    with pytest.raises(ApiError, match="UTF-8"):
        body.changed("n", None)


def test_a_byte_order_mark_stays() -> None:
    raw = b'\xef\xbb\xbf {"model": "m"}'
    assert read(CHAT, JSON, raw).changed("n", 3) == b'\xef\xbb\xbf {"priority":3,"model": "n"}'


def test_what_is_compressed_is_refused_only_where_it_must_change() -> None:
    body = read(CHAT, {**JSON, "Content-Encoding": "gzip"}, b"\x1f\x8b")
    assert body.model is None and body.changed(None, None) == b"\x1f\x8b"
    with pytest.raises(ApiError, match="not compressed"):
        body.changed(None, 10)


@pytest.mark.parametrize("raw", [b"[]", b'"x"', b"3", b" [1] "])
def test_json_that_is_no_object_has_nothing_to_change(raw: bytes) -> None:
    assert read(CHAT, JSON, raw).changed("n", 1) == raw


def test_what_only_the_slow_parser_takes_is_read_unless_it_is_hostile() -> None:
    assert read(CHAT, JSON, b'{"model":"m","x":"\\ud800"}').model == "m"
    start = time.process_time()
    with pytest.raises(ApiError, match="far too large"):
        read(CHAT, JSON, b'{"model":"m","x":[' + b"[]," * 4_000_000 + b'"\\ud800"]}')
    assert time.process_time() - start < 2


part_values = st.binary(max_size=40).filter(lambda value: b"--b" not in value)


@given(st.lists(st.tuples(st.sampled_from(["model", "file", "prompt"]), part_values), max_size=5))
def test_forms(parts: list[tuple[str, bytes]]) -> None:
    def form(parts: list[tuple[str, bytes]]) -> bytes:
        made = b""
        for name, value in parts:
            file = '; filename="model name=.wav"\r\nContent-Type: audio/wav; name=x' if name == "file" else ""
            made += f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + value + b"\r\n"
        return made + b"--b--\r\n"

    body = read("/v1/audio/transcriptions", {"Content-Type": 'multipart/form-data; boundary="b"'}, form(parts))
    models = {value for name, value in parts if name == "model"}
    assert body.model == (models.pop().decode("utf-8", "replace") if len(models) == 1 else None)
    changed = [(name, b"other" if name == "model" else value) for name, value in parts]
    assert body.changed("other", 5) == form(changed)


@pytest.mark.parametrize(
    "raw",
    [
        b"--b\r\nContent-Disposition: form-data; name=model\r\n\r\nm\r\n--b--",
        b"--b\r\nContent-Disposition: form-data; name*=utf-8''model\r\n\r\nm\r\n--b--",
        b'--b\r\nContent-Disposition: form-data; name="mod\\el"\r\n\r\nm\r\n--b--',
        b'--b\r\nContent-Disposition: form-data;\r\n name="model"\r\n\r\nm\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--bb\r\n\r\n\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm',
        b'x--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--',
        b"",
    ],
)
def test_a_form_that_a_worker_may_read_otherwise_names_no_model(raw: bytes) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    assert read("/v1/audio/transcriptions", headers, raw).model in (None, "") or b"name=model" in raw
