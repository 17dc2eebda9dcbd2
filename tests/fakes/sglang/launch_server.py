"""`python -m sglang.launch_server`: SGLang's /generate, streamed or whole; tokens follow from the prompt.

FAKE_SGLANG: `dies` ends at start, `differs` answers otherwise when patched, `fails` refuses every third
request.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODE = os.environ.get("FAKE_SGLANG", "")
PATCH = os.environ.get("KVLAB_PATCH", "unset")
STEP_SECONDS = 0.004 if PATCH == "off" else 0.001
SERVED = {"requests": 0}


def tokens(ids: list[int], count: int) -> list[int]:
    shift = 1 if MODE == "differs" and PATCH != "off" else 0
    return [(sum(ids) * 31 + 7 * k + shift) % 997 for k in range(count)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        if self.path.startswith("/health"):
            return self._send(b"")
        if self.path in ("/server_info", "/get_server_info"):
            memory = {"weight": 1.5, "kvcache": 0.25, "graph": 0.1, "token_capacity": 4096}
            info = {"model_path": flag("--model-path"), "internal_states": [{"memory_usage": memory}]}
            return self._send(json.dumps({**info, "version": "0"}).encode())
        if self.path in ("/get_model_info", "/model_info"):
            return self._send(json.dumps({"model_path": flag("--model-path")}).encode())
        if self.path == "/v1/models":
            return self._send(b'{"data": []}')
        return self._send(b"{}", 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/generate":
            return self._send(b"{}")
        SERVED["requests"] += 1
        asked = json.loads(body)
        if MODE == "fails" and asked.get("stream") and SERVED["requests"] % 3 == 0:
            return self._send(b'{"error": "no"}', 500)
        ids = asked.get("input_ids") or [len(asked["text"])]
        answer = tokens(ids, asked["sampling_params"]["max_new_tokens"])
        if not asked.get("stream"):
            time.sleep(STEP_SECONDS * len(answer))
            return self._send(json.dumps(self._state(ids, answer)).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for k in range(1, len(answer) + 1):
            time.sleep(STEP_SECONDS)
            self.wfile.write(b"data: " + json.dumps(self._state(ids, answer[:k])).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        return None

    @staticmethod
    def _state(ids: list[int], answer: list[int]) -> dict[str, object]:
        meta = {"prompt_tokens": len(ids), "completion_tokens": len(answer), "cached_tokens": 0}
        return {"text": " ".join(f"w{t}" for t in answer), "output_ids": answer, "meta_info": meta}

    def _send(self, body: bytes, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


if __name__ == "__main__":
    print(f"[2026-01-01] kvlab: fake server, KVLAB_PATCH {PATCH}, {' '.join(sys.argv[1:])}", flush=True)
    if MODE == "dies" and PATCH != "off":
        raise RuntimeError("no memory for the pool")
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler).serve_forever()
