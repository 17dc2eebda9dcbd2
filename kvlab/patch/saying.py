"""What has this process said in its log? Each line once."""

import logging

log = logging.getLogger("kvlab.patch")


class Said:
    """The lines that were said."""

    def __init__(self) -> None:
        self.lines: set[str] = set()

    def warn(self, line: str) -> None:
        """A warning, once."""
        self._say(logging.WARNING, line)

    def tell(self, line: str) -> None:
        """Something to know, once."""
        self._say(logging.INFO, line)

    def _say(self, level: int, line: str) -> None:
        if line not in self.lines:
            self.lines.add(line)
            log.log(level, "kvlab: %s", line)


def one_line(error: BaseException) -> str:
    """The error's kind and the beginning of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
