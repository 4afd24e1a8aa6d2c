"""`rocstar eval` against a real server, killed and given again: nothing that was answered is asked twice.

    python benchmarks/eval_endpoint.py --data-folder DATA --tokenizer FOLDER --vllm-python PYTHON

A random model with a real tokenizer (`vocab.json`, `merges.txt`, `tokenizer_config.json`, plain or gzip) is served by
vLLM's OpenAI-compatible server on CPUs, behind a proxy that counts requests. `rocstar eval` asks it rows of AIME 2024,
MATH-500, IFEval and BFCL; it is killed (SIGKILL) when a share of the answers is there, and the same command is
given again. Prints what was asked in both, and last one JSON line. Exit code 1 where an answer that was kept was asked
again, or a result is missing."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOKENIZER = ("vocab.json", "merges.txt", "tokenizer_config.json")
START_SECONDS = 900.0
MODEL = "tiny"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-folder", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path, default=os.environ.get("ROCSTAR_VLLM_PYTHON"))
    parser.add_argument("--limit", type=int, default=12, help="Rows of each benchmark.")
    parser.add_argument("--n", type=int, default=2, help="Attempts per row.")
    parser.add_argument("--tokens", type=int, default=48, help="Of each response.")
    parser.add_argument("--kill-at", type=float, default=0.4, help="Share of the answers after which it is killed.")
    parser.add_argument("--parallel", type=int, default=4)
    given = parser.parse_args()
    if given.vllm_python is None or not os.access(given.vllm_python, os.X_OK):
        print("left out: there is no vLLM; give --vllm-python or set ROCSTAR_VLLM_PYTHON")
        return
    names = ["aime24", "math500", "ifeval", "bfcl"]
    if any(find_spec(name) is None for name in ("nltk", "langdetect")):
        print("IFEval is left out: nltk and langdetect are not installed")
        names.remove("ifeval")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(given.tokenizer, folder / MODEL)
        with serving(given.vllm_python, folder) as port, proxied(port) as proxy:
            figures = measured(given, names, folder, proxy)
    print(json.dumps(figures))
    sys.exit(0 if figures["kept_and_asked_again"] == 0 and figures["results"] == len(names) else 1)


def measured(given: argparse.Namespace, names: list[str], folder: Path, proxy: Proxy) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "rocstar", "eval", MODEL, "--endpoint", proxy.url),
        *("--benchmark", ",".join(names), "--data-folder", str(given.data_folder), "--runs", str(folder / "runs")),
        *("--limit", str(given.limit), "--n", str(given.n), "--max-response-tokens", str(given.tokens)),
        *("--temperature", "0.6", "--parallel", str(given.parallel), "--json", "sandbox.preload=[]"),
    ]
    wanted = len(names) * given.limit * given.n
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while first.poll() is None and proxy.answered < given.kill_at * wanted:
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    time.sleep(2.0)  # what was under way ends at the server
    opened_before = proxy.opened
    kept = kept_attempts(folder / "runs")
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    results = json.loads(made.stdout)["results"] if made.returncode == 0 else []
    for result in results:
        figure = result[f"avg@{given.n}"]
        name = result["setup"]["data"]["benchmark"]
        print(f"{name:10} avg@{given.n} {figure['value']:.3f}  attempts {result['attempts']}")
    asked_again = proxy.opened - opened_before - (wanted - kept)
    print(f"killed with {kept} of {wanted} attempts kept; then {proxy.opened - opened_before} were asked")
    print(f"{opened_before - kept} were under way at the kill and had no answer that was kept")
    return {
        "attempts": wanted,
        "kept_at_kill": kept,
        "asked_before_kill": opened_before,
        "asked_after_kill": proxy.opened - opened_before,
        "kept_and_asked_again": asked_again,
        "results": len(results),
        "attempts_in_results": sum(result["attempts"] for result in results),
    }


def kept_attempts(runs: Path) -> int:
    """In the journals of unfinished evaluations, and in results of finished ones."""
    journals = sum(file.read_bytes().count(b"\n") for file in runs.rglob("asked.jsonl"))
    finished = (json.loads(file.read_text()) for file in runs.rglob("result.json"))
    return journals + sum(result["attempts"] for result in finished)


# The model and its server


def make_model(tokenizer: Path, folder: Path) -> None:
    """A random Qwen2 of two layers with this tokenizer and its chat template."""
    from rocstar.config.sections import ModelSection
    from rocstar.dialogue.codec import Codec
    from rocstar.dialogue.templates import template_for
    from rocstar.learning.models import random_model
    from rocstar.learning.policy import Policy

    source = folder.with_name("tokenizer")
    source.mkdir()
    for name in TOKENIZER:
        packed = tokenizer / f"{name}.gz"
        content = gzip.decompress(packed.read_bytes()) if packed.is_file() else (tokenizer / name).read_bytes()
        (source / name).write_bytes(content)
    codec = Codec.load(source)
    shape = ModelSection(
        vocab_size=codec.vocab_size,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=128,
        rope_theta=10_000.0,
        max_positions=4096,
    )
    Policy(random_model(shape, 0), codec, template_for("model", source)).save(folder)
    shutil.rmtree(source)


@contextmanager
def serving(python: Path, folder: Path) -> Iterator[int]:
    """vLLM's own server on CPUs; yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    options = ["--model", str(folder / MODEL), "--served-model-name", MODEL, "--port", str(port), "--host", "127.0.0.1"]
    options += ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--max-num-seqs", "8"]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    settings |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    log = folder / "vllm.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [str(python), "-m", "vllm.entrypoints.openai.api_server", *options],
            env=outside | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until_it_answers(port, server, log)
        yield port
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def until_it_answers(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < START_SECONDS:
        if server.poll() is not None:
            raise SystemExit(f"vLLM ended as it started: {log.read_text(errors='replace')[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"vLLM did not answer within {START_SECONDS:.0f} s: {log.read_text(errors='replace')[-3000:]}")


# Counting


class Proxy:
    """What went through."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.url = ""
        self.opened = 0
        """Requests that begin an attempt."""
        self.answered = 0
        self.lock = threading.Lock()


@contextmanager
def proxied(target: int) -> Iterator[Proxy]:
    proxy = Proxy(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            roles = {message["role"] for message in json.loads(body)["messages"]}
            with proxy.lock:
                proxy.opened += roles <= {"system", "user"}
            status, content = forwarded(f"http://127.0.0.1:{proxy.target}{self.path}", body)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            with proxy.lock:
                proxy.answered += 1

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client was killed
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        server.shutdown()


def forwarded(url: str, body: bytes) -> tuple[int, bytes]:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return int(answer.status), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


if __name__ == "__main__":
    main()
