"""The fix, in production SGLang: cast the rows that a step reads, not the pool.

    kvlab.patch.apply()      before sglang.Engine; `pip install kvlab` does it where SGLang loads plugins
    kvlab.patch.status()     what is patched, what it did, what it fell back from
    kvlab.patch.remove()     the very functions that were there before
    with kvlab.patch.applied(): ...

Importing this package imports torch and nothing heavier; Triton and SGLang come when they are needed.
"""

from kvlab.patch.api import applied, apply, remove, status

__all__ = ["applied", "apply", "remove", "status"]
