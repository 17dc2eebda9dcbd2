"""Which methods of a backend tell that a step's metadata is there, and which parameters are read of each?"""

import ast

# Method: its first parameters, as releases 0.5.8 to 0.5.23 have them. A release has some, not all.
PARAMETERS = {
    "__init__": ("self", "model_runner"),
    "init_cuda_graph_state": ("self",),
    "init_forward_metadata": ("self", "forward_batch"),
    "init_forward_metadata_out_graph": ("self", "forward_batch", "in_capture"),
    "init_forward_metadata_capture_cuda_graph": (
        *("self", "bs", "num_tokens", "req_pool_indices", "seq_lens", "encoder_lens", "forward_mode"),
    ),
    "init_forward_metadata_replay_cuda_graph": (
        *("self", "bs", "req_pool_indices", "seq_lens", "seq_lens_sum", "encoder_lens", "forward_mode"),
    ),
}
# Before every forward call one of these runs; of the graphs', either the first or both others.
_EAGER = "init_forward_metadata"
_GRAPHS = (
    {"init_forward_metadata_out_graph"},
    {"init_forward_metadata_capture_cuda_graph", "init_forward_metadata_replay_cuda_graph"},
)


def why_untold(cls: ast.ClassDef) -> str | None:
    """Why new metadata of `cls` would go unnoticed, so that a step's decisions outlive it; None where not."""
    methods = {n.name: n for n in cls.body if isinstance(n, ast.FunctionDef)}
    if _EAGER not in methods:
        return f"{cls.name} has no {_EAGER}"
    if not any(names <= methods.keys() for names in _GRAPHS):
        either = " or ".join(" and ".join(sorted(names)) for names in _GRAPHS)
        return f"{cls.name} has no {either}"
    for name, first in PARAMETERS.items():
        if name not in methods:
            continue
        given = methods[name].args
        if tuple(a.arg for a in (*given.posonlyargs, *given.args))[: len(first)] != first:
            return f"{name} does not begin with ({', '.join(first)})"
    return None
