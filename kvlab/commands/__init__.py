"""The command line, a module a command. Each has `register(app)`; heavy imports stay inside the functions."""
