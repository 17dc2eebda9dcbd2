"""`kvlab bench NAME`, a module a name. Each has `register(bench)`; heavy imports stay inside functions."""
