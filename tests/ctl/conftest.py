"""Fixtures of this folder; the fake control API is in `ctl_fixtures`."""

from ctl_fixtures import control, ctl

__all__ = ["control", "ctl"]
