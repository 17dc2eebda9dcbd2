"""kvlab: find, explain and remove the full-pool FP8 KV-cache cast in SGLang's MLA backends."""

__version__ = "0.1.0"
