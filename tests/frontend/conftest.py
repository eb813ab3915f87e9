"""Fixtures of this folder; their classes are in `front_fixtures`."""

from front_fixtures import setup

__all__ = ["setup"]
