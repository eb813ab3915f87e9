"""Who may do what over the control API.

Owns the one rule: everybody who can connect may look and have configured models loaded; the rest is for
administrators. Connecting itself is decided by the socket's mode and group.
"""

from __future__ import annotations

import grp
from collections.abc import Callable

from syshax.errors import NotAllowedError
from syshaxd.peers import Peer


class Rights:
    """own_user: a daemon started with --user counts its own user (that uid) as administrator."""

    def __init__(self, admin_group: Callable[[], str], own_user: int | None) -> None:
        self._admin_group, self._own_user = admin_group, own_user

    def is_administrator(self, peer: Peer) -> bool:
        if peer.uid == 0 or peer.uid == self._own_user:
            return True
        try:
            return grp.getgrnam(self._admin_group()).gr_gid in peer.groups
        except KeyError:
            return False

    def require_administrator(self, peer: Peer, what: str) -> None:
        """Raises NotAllowedError with the group's name."""
        if not self.is_administrator(peer):
            group = self._admin_group()
            raise NotAllowedError(
                f"only administrators may {what} (this is uid {peer.uid})",
                f"root, or members of the group {group}: usermod -aG {group} USER, then log in again",
            )
