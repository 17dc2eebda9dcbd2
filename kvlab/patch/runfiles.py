"""How does somebody outside see what a running server's patch does? A small file for each scheduler process.

`<run dir>/<pid>.json`, rewritten whole when something happens, and by a thread of its own every few seconds
while steps are served. The run directory is $KVLAB_RUN_DIR, else $XDG_RUNTIME_DIR/kvlab, else kvlab-<uid> in
the temporary directory; a reader looks in both of these, since a service has no XDG_RUNTIME_DIR where its
operator's shell has one. A file tells its server's port; the files of processes that are gone are ignored and
swept. A directory may be shared with a container, whose process numbers say nothing here: its files are left
alone.
"""

import atexit
import contextlib
import json
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import __version__
from kvlab.patch.saying import one_line

if TYPE_CHECKING:
    from kvlab.patch.runtime import Runtime

_SECONDS = 2.0
# A disk that was full is tried again after a minute, then after twice that, at last once an hour.
_FIRST_WAIT, _LONGEST_WAIT = 60.0, 3600.0
# Between writing a file and renaming it lie milliseconds: an older one was left by a process that was killed.
_PART_SECONDS = 60.0


def run_dirs() -> list[Path]:
    """Where a scheduler of this user may have written; the first is where this process would."""
    if chosen := os.environ.get("KVLAB_RUN_DIR"):
        return [Path(chosen)]
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    shared = Path(tempfile.gettempdir()) / f"kvlab-{os.getuid()}"
    found = [Path(base) / "kvlab", shared]
    return found if os.environ.get("XDG_RUNTIME_DIR") else found[::-1]


class RunFile:
    """The file of this process. A directory that cannot be written is not worth a request: one line says so,
    and it is tried again later.
    """

    def __init__(self, status: Callable[[], dict[str, Any]], runtime: "Runtime") -> None:
        self._status, self._runtime = status, runtime
        self._pid: int | None = None
        self._path: Path | None = None
        self._is_over = False
        # How long the next failure is waited for, and until when the last one is.
        self._wait, self._not_before = _FIRST_WAIT, 0.0
        # Something to tell that a thread of its own tells within seconds: no step waits for a disk.
        self._is_due = False
        self._thread: threading.Thread | None = None
        self._thread_pid: int | None = None
        # Whose writing is under way, in which process: what was found later is to stay.
        self._writing, self._writer_pid = threading.Lock(), os.getpid()

    def changed(self, force: bool) -> None:
        """Write now if `force`, else soon. Only processes that serve write."""
        if self._is_over or not self._runtime.server:
            return
        if force:
            self._is_due = True
            if time.monotonic() >= self._not_before:
                self._tell()
            return
        self._is_due = True
        if self._thread_pid != os.getpid():  # it does not survive a fork
            self._thread_pid = os.getpid()
            self._thread = threading.Thread(
                target=_tell_now_and_then, args=(weakref.ref(self),), name="kvlab-status", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as e:  # no more threads: not a request's fault
                self._give_up(e)

    def end(self) -> None:
        """The patch is taken out: tell that, and nothing after it, whoever still calls the hooks."""
        if not self._is_over and self._runtime.server:
            for _ in range(3):
                self._tell(is_last=True)
                if self._is_over:
                    return
        self._is_over = True

    def _tell(self, *, is_last: bool = False) -> None:
        if self._writer_pid != os.getpid():
            # Forked: whoever held the lock is not here to free it.
            self._writing, self._writer_pid = threading.Lock(), os.getpid()
        self._is_due = False
        try:
            with self._writing:
                if self._is_over:
                    return
                self._write()
                self._is_over = is_last
        except RuntimeError:
            # A step counted what was never counted before, meanwhile.
            self._is_due = True
        except OSError as e:
            self._is_due = True
            self._not_before = time.monotonic() + self._wait
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._untold(e)
        except Exception as e:
            self._give_up(e)
        else:
            self._wait = _FIRST_WAIT

    def _give_up(self, error: Exception) -> None:
        self._is_over = True
        self._untold(error)

    def _untold(self, error: Exception) -> None:
        if self._path is not None and self._pid == os.getpid():
            # Figures that nobody brings up to date would pass for this server's.
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._runtime.say(f"no status for `kvlab patch status --url`: {one_line(error)}")

    def _write(self) -> None:
        folder = run_dirs()[0]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to {_owner(folder)}; set KVLAB_RUN_DIR")
        pid = os.getpid()
        if self._pid != pid:
            _sweep_parts(folder)
        path = folder / f"{pid}.json"
        of = {"pid": pid, "started": _started(pid), "namespace": _namespace(), "kvlab": __version__}
        text = json.dumps({**of, "server": self._runtime.server, **self._status()})
        part = folder / f".{pid}.part"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        self._path = path
        if self._pid != pid:
            self._pid = pid
            atexit.register(_forget, path, pid, weakref.ref(self))


def _tell_now_and_then(file: weakref.ref[RunFile]) -> None:
    """While it is anybody's, write `file` where it is due."""
    while True:
        time.sleep(_SECONDS)
        its = file()
        if its is None or its._is_over:
            return
        if its._is_due and time.monotonic() >= its._not_before:
            its._tell()
        del its


def _sweep_parts(folder: Path) -> None:
    """What processes that were killed before they had renamed it left in `folder`."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            # A container that shares the folder numbers its processes by itself: age tells there.
            is_old = time.time() - part.stat().st_mtime > _PART_SECONDS
            if is_old and not _started_as(part.name.split(".")[1]):
                part.unlink()


def _started_as(number: str) -> str:
    """`_started` of what may be a process number."""
    return _started(int(number)) if number.isdecimal() else ""


def _forget(path: Path, pid: int, file: weakref.ref[RunFile]) -> None:
    if os.getpid() != pid:
        return
    its = file()
    if its is not None:
        # Its thread ends wherever it is when Python does: not in the middle of a file, nor after this.
        its._is_over = True
        its._writing.acquire(timeout=1.0)
    with contextlib.suppress(OSError):
        path.unlink()


def running(port: int | None = None) -> list[dict[str, Any]]:
    """What the live schedulers of the server on `port`, or of all servers, say of themselves."""
    found = []
    for path, said in _files():
        if _is_of_another_namespace(said):
            continue
        if not said["started"] or _started(said["pid"]) != said["started"]:
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        if port is None or said["server"].get("port") == port:
            found.append(said)
    return sorted(found, key=_rank)


def _rank(said: dict[str, Any]) -> tuple[int, ...]:
    numbers = (said["server"].get(n) for n in ("dp_rank", "pp_rank", "tp_rank"))
    return tuple(n if isinstance(n, int) else 0 for n in numbers)


def elsewhere() -> list[str]:
    """Why a server's files may not have been found, as far as the run directories show: a clause each."""
    found = []
    for folder in run_dirs():
        try:
            is_mine = folder.stat().st_uid == os.getuid()
        except PermissionError:
            found.append(f"{folder} is not for this user to look into")
        except OSError:
            continue
        else:
            found += [] if is_mine else [f"{folder} belongs to {_owner(folder)}, ask as that user"]
    if any(_is_of_another_namespace(said) for _, said in _files()):
        found.append("a scheduler of another container has written there, ask inside it")
    ports = sorted({p for said in running() if isinstance(p := said["server"].get("port"), int)})
    if ports:
        found.append(f"patched servers here have port {', '.join(map(str, ports))}")
    return found


def _files() -> list[tuple[Path, dict[str, Any]]]:
    """What schedulers have written, live or gone, here or in a container that shares the directory."""
    found = []
    for path in sorted(path for folder in run_dirs() if _is_mine(folder) for path in folder.glob("*.json")):
        if not path.is_file():
            continue
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            said["started"], said["server"].get("port")
            if type(said["pid"]) is not int:
                continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        found.append((path, said))
    return found


def _is_mine(folder: Path) -> bool:
    """What another user put where ours would be says nothing."""
    try:
        return folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def _owner(path: Path) -> str:
    try:
        return f"user {path.owner()}"
    except (OSError, KeyError):
        return "another user"


def _namespace() -> str:
    """Which process numbers are meant; "" where the system does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_of_another_namespace(said: dict[str, Any]) -> bool:
    # Earlier versions did not say.
    return said.get("namespace", _namespace()) != _namespace()


def _started(pid: int) -> str:
    """The kernel's start time of a process, which a later one of its number has not; "" if gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The command's name, in parentheses, may hold spaces.
    fields = stat.rpartition(")")[2].split()
    # One that has ended and that nobody has waited for has a number still, and serves nothing.
    return "" if fields[0] in ("Z", "X") else fields[19]
