"""Which environment variables does kvlab read? A new one is added here; a test looks for others."""

# What a server is started with, or reads as it serves.
SERVER = {
    "KVLAB_PATCH": "the policy or strategy, or off (kvlab.patch.policy)",
    "KVLAB_PATCH_STRICT": "refuse to serve unpatched",
    "KVLAB_RUN_DIR": "where schedulers write their status (kvlab.patch.runfiles)",
    "KVLAB_CACHE": "where compiled kernels and downloaded sources are kept",
}
# What other parts of kvlab read, or tell a process that they start.
OTHERS = {
    "KVLAB_API_KEY": "the key that the asked server takes",
    "KVLAB_BENCH_TURN": "a file that is made when a process may have the GPU (kvlab.bench.step)",
    "KVLAB_BOOK": "a chapter is executed for the book, not by a reader",
    "KVLAB_COMMIT": "the commit of a checkout that travelled without its history",
    "KVLAB_DATA": "another data folder",
}
