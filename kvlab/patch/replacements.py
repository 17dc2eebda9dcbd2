"""What was changed in classes and modules of others, and how to put the very same objects back."""

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Replacements:
    """What was changed, and how to put it back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or module; `undo` restores the very object that stood there."""
        was = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def back() -> None:
            # What somebody else put on top of ours stays theirs: it still calls us, and we pass through.
            if vars(owner).get(name) is not value:
                return
            if was is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, was)

        self._undo.append(back)

    def on_undo(self, action: Callable[[], None]) -> None:
        self._undo.append(action)

    def extend(self, other: "Replacements") -> None:
        self._undo.extend(other._undo)

    def undo(self) -> None:
        """Newest first."""
        while self._undo:
            self._undo.pop()()
