"""A stand-in for the SGLang package: a server that answers, and a load generator that asks. No model."""
