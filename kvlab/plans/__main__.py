"""`python -m kvlab.plans [--record FILE]`."""

import sys

import msgspec

from kvlab import plans, provenance

found = plans.observe()
if sys.argv[1:2] == ["--record"]:
    document = {"provenance": provenance.collect(), "observed": found}
    with open(sys.argv[2], "wb") as f:
        f.write(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
