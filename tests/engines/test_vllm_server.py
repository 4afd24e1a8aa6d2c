"""How a server is started and ended, and what is believed of its answers: without vLLM, a stub stands in its place."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rocstar.engines.vllm_client import VllmAnswer, read_answer, read_metrics
from rocstar.engines.vllm_server import INSIDE, VllmServer, VllmSettings, kv_bytes
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.types import Finish, VersionSpan
from tests.engines.vllm_stand_in import METRICS

STUB = '''
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:] if "=" in argument)
if "broken" in options["model"]:
    print("(EngineCore) ERROR [core.py:1510] KeyError: 'factor'", *range(20), sep="\\n", flush=True)
    sys.exit("no such model")
WORKER = """
import os, time
from multiprocessing.shared_memory import SharedMemory
if "STUB_MEMORY" in os.environ:
    memory = SharedMemory(os.environ["STUB_MEMORY"] or None, create=True, size=8)
    print("memory", memory.name, end=" ")
print(flush=True)
time.sleep(1000)
"""
worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
print(worker.stdout.readline(), "worker", worker.pid, flush=True)

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(options["port"])), Health).serve_forever()
'''
CONFIG = '{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}'


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    place = tmp_path / "stub" / "vllm" / "entrypoints" / "openai"
    place.mkdir(parents=True)
    for package in (place, place.parent, place.parent.parent):
        (package / "__init__.py").touch()
    (place / "api_server.py").write_text(STUB)
    return tmp_path / "stub"


def settings(folder: Path, stub: Path | None = None, **changes: Any) -> VllmSettings:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(CONFIG)
    path = os.pathsep.join((str(INSIDE), str(stub)))
    options: dict[str, Any] = {
        "model": model,
        "python": Path(sys.executable),
        "log": folder / "vllm.log",
        "max_tokens": 256,
        "capacity_tokens": 1024,
        "environment": {"PYTHONPATH": path},
    }
    return VllmSettings(**{**options, **changes})


def worker_of(log: Path) -> int:
    return int(log.read_text().split("worker ")[-1].split()[0])


def is_there(file: Path) -> bool:
    return file.exists()


async def gone(pid: int) -> None:
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("named", ["", "vllm_dist_{}-tp:0-[0-1]-cpushm_1"], ids=["python's", "vllm's, on CPUs"])
async def test_shared_memory_of_a_server_that_was_killed_is_given_back(tmp_path: Path, stub: Path, named: str) -> None:
    asked = settings(tmp_path, stub)
    asked = replace(asked, environment={**(asked.environment or {}), "STUB_MEMORY": named.format(os.getpid())})
    server = await VllmServer.start(asked)
    memory = Path("/dev/shm", (tmp_path / "vllm.log").read_text().split("memory ")[1].split()[0])
    os.killpg(server.pid, signal.SIGKILL)
    await gone(worker_of(tmp_path / "vllm.log"))
    assert is_there(memory), "nobody was left to remove it"
    await server.close()
    assert not is_there(memory)


async def test_closing_a_server_ends_all_that_it_started(tmp_path: Path, stub: Path) -> None:
    """Also where it was killed before."""
    for killed in (False, True):
        server = await VllmServer.start(settings(tmp_path, stub))
        worker = worker_of(tmp_path / "vllm.log")
        assert psutil.pid_exists(worker)
        if killed:
            os.kill(server.pid, signal.SIGKILL)
        await server.close()
        await gone(worker)
        await server.close()


STARTER = """
import asyncio, sys
from pathlib import Path
from tests.engines.test_vllm_server import settings
from rocstar.engines.vllm_server import VllmServer

async def main():
    server = await VllmServer.start(settings(Path(sys.argv[1]), Path(sys.argv[2])))
    print(server.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_a_server_and_its_workers_end_when_its_starter_is_killed(tmp_path: Path, stub: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path), str(stub)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    starter = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
    assert starter.stdout
    server = int(await starter.stdout.readline())
    starter.kill()
    await starter.wait()
    await gone(server)
    await gone(worker_of(tmp_path / "vllm.log"))


async def test_a_server_sees_the_gpus_it_was_given(tmp_path: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CUDA_VISIBLE_DEVICES=4,5,6,7 the first server went to GPU 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    server = await VllmServer.start(settings(tmp_path, stub, gpus=("5", "6")))
    assert psutil.Process(server.pid).environ()["CUDA_VISIBLE_DEVICES"] == "5,6"
    await server.close()


async def test_a_server_that_cannot_start_is_told_with_the_end_of_its_log(tmp_path: Path, stub: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    asked = settings(broken, stub)
    asked.log.write_text(earlier := "ValueError: why it ended while it served\n")
    with pytest.raises(
        EngineUnavailable, match=r"(?s)ended with exit code 1 .*vllm.log says\n.*factor.*no such model"
    ) as told:
        await VllmServer.start(asked)
    assert earlier not in str(told.value) and asked.log.read_text().startswith(earlier)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"capacity_tokens": None}, "needs capacity_tokens"),
        ({"capacity_tokens": 200}, "capacity_tokens 200 must hold max_tokens 256"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"python": Path("/nonexistent/python")}, "scripts/vllm_env"),
    ],
)
async def test_settings_that_cannot_be_obeyed_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        await VllmServer.start(settings(tmp_path, **changes))


def test_keys_and_values_are_counted_by_shape() -> None:
    config = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    assert kv_bytes(config, 1, "bfloat16") == 114_688
    assert kv_bytes({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 10, "float32") == 10_240


def answer(**changes: Any) -> dict[str, Any]:
    choice = {
        "finish_reason": "stop",
        "token_ids": [5, 6],
        "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -2.0}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }
    return {"choices": [{**choice, **changes}], "usage": {"prompt_tokens_details": {"cached_tokens": 16}}}


def read(value: dict[str, Any]) -> Any:
    return read_answer(msgspec.json.decode(msgspec.json.encode(value), type=VllmAnswer), 10)


def test_an_answer_says_what_was_written_and_by_which_weights() -> None:
    written, cached = read(answer())
    assert (written.token_ids, written.logprobs, written.finish) == ((5, 6), (-1.0, -2.0), Finish.STOP)
    assert written.version_spans == (VersionSpan(3, 1), VersionSpan(4, 1))
    assert cached == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5]},
        {"token_ids": [5, 7]},
        {"logprobs": None},
        {"token_ids": [5, 10], "logprobs": {"content": [{"token_id": t, "logprob": -1.0} for t in (5, 10)]}},
        {"logprobs": {"content": [{"token_id": 5, "logprob": -9999.0}, {"token_id": 6, "logprob": -2.0}]}},
        {"logprobs": {"content": [{"token_id": 5, "logprob": 0.5}, {"token_id": 6, "logprob": -2.0}]}},
        {"finish_reason": "error"},
        {"weight_versions": None},
        {"weight_versions": [{"version": "default", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "3", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "3", "start": 0, "end": 9}]},
        {"weight_versions": [{"version": "3", "start": 1, "end": 2}]},
    ],
    ids=str,
)
def test_an_answer_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineUnavailable):
        read(answer(**changes))


def test_the_cache_is_counted_without_the_block_that_vllm_keeps() -> None:
    """As vLLM says it of a small GPT-OSS, where four blocks of 128 are 1.33 requests of 55 tokens."""
    said = METRICS.format(used=0.0, running=0, produced=0)
    for old, new in (('"16"', '"128"'), ('"1040"', '"73"'), ('"65"', '"4"')):
        said = said.replace(old, new)
    assert read_metrics(said, "http://there").capacity_tokens == 54


def test_metrics_that_lack_a_figure_are_refused() -> None:
    with pytest.raises(EngineUnavailable, match="does not report the size of its KV cache"):
        read_metrics('vllm:num_requests_running{engine="0"} 1.0\n', "http://there")
