"""Runs things in processes of their own and brings back what they saw."""

import multiprocessing
import os
import sys
from pathlib import Path

RIG = Path(__file__).resolve().parent


def state():
    """Is this process patched, and with what?"""
    import multiprocessing.context

    from kvlab import patch

    popen = multiprocessing.context.SpawnProcess._Popen
    return {"strategy": patch.status()["strategy"], "patched": hasattr(popen, "__wrapped__")}


def grandchild():
    """What a process that is spawned from here says."""
    return spawned(state)


def _send(pipe, what):
    pipe.send(what())


def spawned(what, *, plain=False):
    """`what()` in a spawned process; unless `plain`, started as SGLang's own targets are."""
    from kvlab.patch import api, spawn

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    patch = api._patch
    target = _send
    if not plain and patch is not None and patch.is_applied:
        target = spawn.Patched(_send, patch.runtime.asked)
    process = context.Process(target=target, args=(there, what))
    process.start()
    answer = here.recv()
    process.join()
    return answer


def forked(what):
    """`what()` in a forked process."""
    import json

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(what()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        text = file.read()
    os.waitpid(pid, 0)
    sys.stdout.flush()
    return json.loads(text)
