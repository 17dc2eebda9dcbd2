"""The real SGLang on a CPU: stand-ins for the two GPU libraries, and builders of real backends and pools."""
