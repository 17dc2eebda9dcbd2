"""`kvlab backends`: which attention backend could serve this model here, and what refuses the others."""

from typing import TYPE_CHECKING

import typer

from kvlab.errors import BadInput

if TYPE_CHECKING:
    from kvlab.backends import Question, Verdict
    from kvlab.backends.advice import Option


def register(app: typer.Typer) -> None:
    @app.command()
    def backends(
        model: str = typer.Option("", help="Preset or config.json, e.g. glm-5."),
        gpu: str = typer.Option("", help="Card, e.g. h200 or rtx-pro-6000; live for this machine's."),
        sglang: str = typer.Option("", help="SGLang release, e.g. 0.5.9; the installed one by default."),
        flashinfer: str = typer.Option(
            "",
            help="flashinfer release; the one that the SGLang pins, or beside the installed SGLang its own.",
        ),
        kv_dtype: str = typer.Option("fp8_e4m3", help="fp8_e4m3, fp8_e5m2 or bf16."),
        tp: int = typer.Option(
            0, help="Tensor-parallel ranks; 8, or the most under it that divide the heads."
        ),
        page_size: int = typer.Option(
            0, help="--page-size as you would pass it; SGLang's default otherwise."
        ),
        matrix: bool = typer.Option(False, "--matrix", help="All of the models, cards and releases at once."),
        as_json: bool = typer.Option(False, "--json", help="One JSON object."),
    ) -> None:
        """Every MLA backend of a release on a card: works or not, why, and the check that says so."""
        if matrix:
            _matrix(model, gpu, sglang, kv_dtype, tp, as_json)
            return
        from kvlab.backends import live

        if not sglang:
            sglang = live.here("sglang") or ""
            flashinfer = flashinfer or live.here("flashinfer-python") or ""
        for name, value in (("--model", model), ("--gpu", gpu), ("--sglang", sglang)):
            if not value:
                raise BadInput(
                    f"{name} is missing: kvlab backends --model glm-5 --gpu rtx-pro-6000 --sglang 0.5.9"
                )
        from kvlab.backends import answer_of, decide, question

        if page_size < 0 or tp < 0:
            raise BadInput(f"--tp {tp} --page-size {page_size}: neither can be negative")
        q = question(
            model,
            gpu,
            sglang,
            flashinfer=flashinfer or None,
            kv_dtype=kv_dtype,
            tp=tp or None,
            page_size=page_size or None,
        )
        if as_json:
            _print(answer_of(q))
        else:
            from kvlab.backends.advice import advise

            verdicts = decide(q)
            _table(q, verdicts, advise(q, verdicts))


def _print(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _matrix(model: str, gpu: str, sglang: str, kv_dtype: str, tp: int, as_json: bool) -> None:
    from kvlab.backends import live, matrix

    for release in filter(None, sglang.split(",")):
        live.load("sglang", release)
    found = matrix.build(
        model.split(",") if model else matrix.MODELS,
        gpu.split(",") if gpu else matrix.GPUS,
        sglang.split(",") if sglang else None,
        kv_dtype=kv_dtype,
        tp=tp or None,
    )
    if as_json:
        _print(found)
        return
    for cell in found.cells:
        state = {True: "works", False: "no", None: "open"}[cell.works] + (
            " (casts)" if cell.casts_pool else ""
        )
        typer.echo(
            f"{cell.model:18}{cell.gpu:14}{cell.sglang:13}{cell.backend:24}{state:16}{found.reasons[cell.reason]}"
        )


def _table(q: "Question", verdicts: "list[Verdict]", options: "list[Option]") -> None:
    typer.echo(
        f"{q.geometry.name} on {q.gpu.name} ({q.gpu.sm}), SGLang {q.sglang}, flashinfer {q.flashinfer}, "
        f"{q.kv_dtype} cache, TP {q.tp}: {q.heads} heads a rank\n"
    )
    for v in verdicts:
        state = {True: "works", False: "no", None: "open"}[v.works]
        marks = [
            *(["SGLang's default here"] if v.default else []),
            *(["casts the whole pool"] if v.works and v.casts_pool else []),
            *(["rounds Q to FP8"] if v.works and v.rounds_q else []),
            *([f"page size {v.page_size}"] if v.works and v.page_size else []),
        ]
        typer.echo(f"{v.backend:24}{state:7}{', '.join(marks)}")
        for text in [v.reason, *v.refusals[1:], *(v.notes if v.works else [])]:
            typer.echo(f"    {text}")
        if v.works:
            typer.echo(f"    flags: {' '.join(v.flags)}")
        for e in v.evidence:
            typer.echo(f"      {e}")
    typer.echo("\nWithout a patch:")
    for o in options:
        typer.echo(f"  {o.what}\n    {' '.join(o.flags)}")
        typer.echo(f"    accuracy: {o.accuracy}\n    memory: {o.memory}\n    time: {o.time}")
