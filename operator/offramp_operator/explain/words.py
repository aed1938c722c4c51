"""Ages, shares and seconds as people read them."""

from __future__ import annotations


def ago(then: float | None, now: float) -> str:
    """How long since ``then``, as kubectl tells ages; empty where it is not known."""
    return "" if not then else duration(now - then)


def duration(seconds: float) -> str:
    """``45s``, ``12m``, ``3h20m``, ``5d``."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    minutes = whole // 60
    if minutes < 120:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    return f"{hours // 24}d"


def share(fraction: float) -> str:
    """A fraction as percent, two decimals at most: ``1%``, ``0.37%``."""
    text = f"{100 * fraction:.2f}".rstrip("0").rstrip(".")
    return f"{text or '0'}%"


def milliseconds(seconds: float) -> str:
    """``40ms``, ``1.5s``: an objective as the user wrote it."""
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1e3:g}ms"
