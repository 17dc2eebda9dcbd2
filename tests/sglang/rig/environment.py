"""Makes an SGLang release importable on a CPU. Import before SGLang; changes this process only."""

import importlib.machinery
import importlib.metadata
import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.overrides import TorchFunctionMode

from rig import standins

VERSION = importlib.metadata.version("sglang")

# torchvision's own operators do not load beside a CPU build of torch; importing it only needs their names.
_LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor a, Tensor b, float c) -> Tensor")


def _module(name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
    return module


def _unavailable(*args, **kwargs):
    raise NotImplementedError("no GPU here")


_flash = _module(
    "sgl_kernel.flash_attn",
    flash_attn_with_kvcache=standins.flash_attn_with_kvcache,
    flash_attn_varlen_func=_unavailable,
    get_scheduler_metadata=_unavailable,
)
_module("sgl_kernel", merge_state_v2=standins.merge_state_v2, flash_attn=_flash, __path__=[])


def _any_function(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _unavailable


# Speculative decoding imports this part and calls nothing of it on these paths.
_module("sgl_kernel.kvcacheio").__getattr__ = _any_function


class OnCPU(TorchFunctionMode):
    """`device="cuda"` literals become the CPU, pinned memory ordinary memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)
