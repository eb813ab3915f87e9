"""An idle worker's way back to a restarted daemon: a thread that waits for the session's end and opens another.

Without it only a request would notice, and a front-end sends none to a worker whose experts are away. It touches
neither the session that computes nor the accelerator: the next request takes what it has opened.

It connects only where a daemon says that it serves (sockets.daemon_boot). Must not hold the attachment: that ends with
its engine, and the thread with it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Protocol

from syshax.client import Model
from syshax.endings import ending
from syshax.errors import SessionEndedError, SyshaxError
from syshax.protocol import Closing
from syshax.sockets import daemon_boot
from syshax.vllm.prepare import GONE

logger = logging.getLogger("vllm.syshax")

_PAUSE_S = 0.5
_LONGEST_S, _LONGEST_AFTER_REFUSAL_S = 2.0, 30.0
"""Pauses double up to these: while a daemon comes up; where it is up and an administrator has to do something."""


class Renewable(Protocol):
    """What is needed of syshax.vllm.attachment.Attachment."""

    @property
    def newest(self) -> Model: ...
    def renew(self, lost: Model, ask: bool) -> None: ...


def keep(attachment: Renewable, runtime_dir: Path) -> None:
    """From now on, as long as `attachment` lives, a session that ends is followed by another."""
    arguments = (weakref.ref(attachment), runtime_dir)
    threading.Thread(target=_keep, args=arguments, name="syshax-keeping", daemon=True).start()


def _keep(attachment: weakref.ref[Renewable], runtime_dir: Path) -> None:
    while (model := _newest(attachment)) is not None:
        closing = model.wait_ended()
        if isinstance(over := ending(closing), SessionEndedError):
            logger.error("%s: this worker does not attach again and serves nothing more; restart it", over.message)
            return
        _follow(attachment, model, closing, runtime_dir)
        del model


def _newest(attachment: weakref.ref[Renewable]) -> Model | None:
    alive = attachment()
    return alive.newest if alive is not None else None


def _follow(attachment: weakref.ref[Renewable], lost: Model, closing: int, runtime_dir: Path) -> None:
    """Until `lost` is not the newest session any more, or nobody needs one."""
    pause, said = _PAUSE_S, ""
    while _newest(attachment) is lost:
        boot = daemon_boot(runtime_dir)
        if boot and (closing != Closing.DRAINING or boot != lost.boot_id):
            # The daemon that lost it is there still: what it held was unloaded, which is not to be undone.
            trouble, most = _renew(attachment, lost, ask=boot != lost.boot_id)
            if trouble and trouble != said:
                logger.warning("not attached to syshaxd, trying again: %s", trouble)
            said, pause = trouble, min(2 * pause, most)
        time.sleep(pause)


def _renew(attachment: weakref.ref[Renewable], lost: Model, ask: bool) -> tuple[str, float]:
    """What went wrong ("" if nothing did), and the longest pause after it."""
    alive = attachment()
    if alive is None:
        return "", _PAUSE_S
    try:
        alive.renew(lost, ask)
    except GONE as error:
        return str(error), _LONGEST_S
    except SyshaxError as error:
        return str(error), _LONGEST_AFTER_REFUSAL_S
    except Exception as error:  # noqa: BLE001  (descriptors that ran out, files that cannot be read: it goes on)
        return f"{type(error).__name__}: {error}", _LONGEST_AFTER_REFUSAL_S
    logger.info("attached to syshaxd again as session %d, while no request came", alive.newest.session_id)
    return "", _PAUSE_S
