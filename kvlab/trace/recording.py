"""What is left of a recording? A folder with the traces, `provenance.json` and a README; or nothing."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvlab import provenance
from kvlab.trace.thin import leave_out, shorten_paths


class Try(msgspec.Struct, kw_only=True, frozen=True):
    """One batch and prompt length that was tried; `share` is the KV cast's of GPU busy time."""

    file: str
    batch: int | None
    context: int | None
    step_ms: float
    busy_ms: float
    cast_ms: float
    share: float


class Recording(msgspec.Struct, kw_only=True, frozen=True):
    """What provenance.json holds; `server` is what the server said of itself, `request` what was asked.

    `patch` is `kvlab.patch.status()` of the benchmark's process when it was done, `results` the benchmark's
    own lines, `tries` what was weighed where one trace of several was kept.
    """

    provenance: provenance.Provenance
    how: str
    request: dict[str, Any]
    server: dict[str, Any]
    files: list[str]
    patch: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    tries: list[Try] = []


def keep(
    out: Path,
    made: Path,
    files: Sequence[Path],
    how: str,
    request: dict[str, Any],
    info: dict[str, Any],
    *,
    stack: bool = True,
    thin: bool = False,
    patch: dict[str, Any] | None = None,
    results: Sequence[dict[str, Any]] = (),
    tries: Sequence[Try] = (),
    secret: str | None = None,
) -> list[Path]:
    """Fill the folder `made`, which is to become `out`: the traces `files`, what they are of, a README.

    `secret` is left out of the command. Returns the traces' paths in `out`.
    """
    many = len({shape_of(f) for f in files}) > 1
    names = [name_of(file, many=many) for file in files]
    for file, name in zip(files, names, strict=True):
        shorten_paths(file, made / name, stack=stack)
        if thin:
            leave_out(made / name, made / "thin")
            os.replace(made / "thin", made / name)
    origin = provenance.collect()
    if secret:
        origin = msgspec.structs.replace(origin, command=origin.command.replace(secret, "KEY"))
    recording = Recording(
        provenance=origin,
        how=how,
        request=request,
        server=info,
        files=names,
        patch=patch or {},
        results=list(results),
        tries=list(tries),
    )
    text = msgspec.json.format(msgspec.json.encode(recording), indent=2)
    (made / "provenance.json").write_bytes(text + b"\n")
    (made / "README.md").write_text(_readme(recording), "utf-8")
    return [out / name for name in names]


def name_of(file: Path, *, many: bool) -> str:
    """A trace's name in the folder: its stage, the batch and length where there are several, its ranks."""
    stage = re.search(r"[-_](decode|extend|prefill)\.", file.name, re.IGNORECASE)
    batch, context = shape_of(file)
    parts = [stage[1].lower() if stage else "decode"]
    parts += [f"b{batch}", f"c{context}"] if many and batch is not None else []
    parts += [f"{k}{int(n):02d}" for k, n in re.findall(r"(TP|DP|PP|EP)-(\d+)", file.name)]
    return "-".join(parts) + ".trace.json.gz"


def shape_of(file: Path) -> tuple[int | None, int | None]:
    """Batch size and prompt length, from the name that the one-batch benchmark or `name_of` gives a trace."""
    found = re.search(r"_batch(\d+)_input(\d+)_|-b(\d+)-c(\d+)[-.]", file.name)
    return (int(found[1] or found[3]), int(found[2] or found[4])) if found else (None, None)


def _readme(r: Recording) -> str:
    p = r.provenance
    rows = [
        f"# Trace from SGLang's {r.how}, {p.date[:10]}",
        "",
        f"GPUs: {', '.join(sorted(set(p.gpus))) or 'none seen by the recording process'}; driver {p.driver}; "
        f"KVLAB_PATCH={r.request.get('kvlab_patch_of_server', p.kvlab_patch)}.",
        "",
        "Files (paths of the host in them shortened): " + ", ".join(f"`{f}`" for f in r.files) + ".",
        "`provenance.json` has versions, command, what was asked and what the server said of itself.",
    ]
    return "\n".join(rows) + "\n"
