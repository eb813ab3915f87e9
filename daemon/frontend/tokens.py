"""How many tokens an answer had, without reading it: from the `usage` near its end, else from a stream's events.

Only a client that asks for it (`stream_options.include_usage`) gets `usage` in a stream, and the answer is not ours to
change. So a stream's events count as they pass, as one token each, which is right for vLLM but where one event carries
several (speculative decoding); `usage` at the end, where it is there, adds what the events did not show.
"""

from __future__ import annotations

import re

from syshaxd.frontend.instruments import Counter

_NEWLINE = ord("\n")
_DONE = b"data: [DONE]"
_USAGE = b'"usage"'
_END_BYTES = 4096
"""So far from the end `usage` is looked for."""
_TOLD_AT = 24
"""Newlines that are kept back before the counter on the board is told: that costs more than they do."""
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,15})')
_GENERATED = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,15})')


class Tokens:
    """Those of one answer; the counters grow while it passes.

    An event is its lines and an empty one, so newlines tell events, wherever chunks are cut. They are counted two
    chunks late: the last two may hold `usage` and `[DONE]`, which are no tokens. The first event is not counted: in a
    chat it only names the role, and it makes up for the one with the finish reason otherwise.
    """

    __slots__ = (
        "_counted",
        "_generated",
        "_in_newer",
        "_in_older",
        "_lines",
        "_newer",
        "_newlines",
        "_older",
        "_prompt",
        "_streamed",
        "_tell_at",
    )

    def __init__(self, prompt: Counter, generated: Counter, streamed: bool) -> None:
        self._prompt, self._generated, self._streamed = prompt, generated, streamed
        self._older = self._newer = b""
        self._in_older = self._in_newer = 0
        self._newlines, self._tell_at = 0, _TOLD_AT
        self._lines = 0
        """Newlines of an event; 0: none has come yet."""
        self._counted = 0

    def passed(self, chunk: bytes) -> None:
        """The next part of the body; of the last two no more is kept than `usage` may need."""
        if self._streamed:
            self._newlines += self._in_older
            if self._newlines >= self._tell_at:
                self._tell_at = self._newlines + _TOLD_AT
                self._tell(self._newlines // self._lines - 1)
            self._in_older, self._in_newer = self._in_newer, chunk.count(_NEWLINE)
            if not self._lines:
                self._lines = 3 if chunk.startswith(b"event:") else 2
        self._older, self._newer = self._newer, chunk if len(chunk) <= _END_BYTES else chunk[-_END_BYTES:]

    def end(self) -> None:
        """The answer has ended, or was broken off."""
        whole = self._older + self._newer
        prompt, generated = usage_of(whole[-_END_BYTES:])
        self._prompt.inc(prompt)
        if generated is not None:
            self._tell(generated)
        elif self._lines:
            newlines = self._newlines + self._in_older + self._in_newer
            self._tell(newlines // self._lines - 1 - (_DONE in whole))
        self._older = self._newer = b""

    def _tell(self, generated: int) -> None:
        """So many by now; a counter cannot take back what it was told before."""
        if generated > self._counted:
            self._generated.inc(generated - self._counted)
            self._counted = generated


def usage_of(end: bytes) -> tuple[int, int | None]:
    """Tokens of the prompt, and generated ones (None: not told), by the last `usage` in the end of an answer.

    Text that the model wrote cannot pass for it: within a JSON string its quotation marks are escaped.
    """
    start = end.rfind(_USAGE)
    if start < 0:
        return 0, None
    prompt, generated = _PROMPT.search(end, start), _GENERATED.search(end, start)
    if generated is None:
        return int(prompt[1]) if prompt else 0, 0 if prompt else None
    return int(prompt[1]) if prompt else 0, int(generated[1])
