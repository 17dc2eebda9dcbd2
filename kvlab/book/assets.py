"""What the pages need to work without a network: plotly.min.js and MathJax, from their PyPI packages."""

import shutil
from pathlib import Path

from kvlab.errors import BadInput


def prepare(folder: Path) -> Path:
    """Put plotly.min.js and mathjax/ into `folder` unless they are there already; returns it."""
    import plotly

    plotly_js = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    mathjax = _mathjax()
    _copy(plotly_js, folder / "plotly.min.js")
    _copy(mathjax / "tex-svg.js", folder / "mathjax" / "tex-svg.js")
    for extension in sorted((mathjax / "input" / "tex" / "extensions").glob("*.js")):
        _copy(extension, folder / "mathjax" / "input" / "tex" / "extensions" / extension.name)
    return folder


def _mathjax() -> Path:
    # The package is a Django app, but only its files are wanted: find them without importing Django.
    from importlib import metadata

    try:
        files = metadata.files("django-static-mathjax") or []
    except metadata.PackageNotFoundError:
        raise BadInput("the book needs MathJax's files: pip install django-static-mathjax==3.2.2.1") from None
    for f in files:
        if f.name == "tex-svg.js" and f.parent.name == "es5":
            return Path(str(f.locate())).parent
    raise BadInput("django-static-mathjax has no es5/tex-svg.js; install 3.2.2.1")


def _copy(source: Path, target: Path) -> None:
    if target.is_file() and target.stat().st_size == source.stat().st_size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
