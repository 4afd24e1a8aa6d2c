"""Programs as agents behind walls: what they reach, and what is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rocstar.agents.agent import MOST_CONNECTIONS, GatewayAgent
from rocstar.errors import ConfigError
from rocstar.sandbox import walled
from rocstar.sandbox.walls import linux
from rocstar.types import Stop, Trajectory
from tests.agents import examples
from tests.agents.examples import SCRIPT, Told, named
from tests.forks import forked
from tests.rollout.examples import ANSWER, PROBLEM, roller
from tests.sandbox.driver import eventually

LACK = walled.why_not()
SYS_ADMIN = 21  # CAP_SYS_ADMIN
needs_walls = pytest.mark.skipif(bool(LACK), reason=f"no walls here: {LACK}")
GIVEN: dict[str, Any] = {"seconds": 120.0, "at_once": 8, "reads": ()}


def program(tmp_path: Path, text: str, **changes: Any) -> GatewayAgent:
    return examples.program(tmp_path, text, **{**GIVEN, **changes})


async def made(agent: GatewayAgent) -> Trajectory:
    return await examples.made(agent, [ANSWER])


async def printed(tmp_path: Path, text: str, **changes: Any) -> Any:
    """What it says last on stderr, as JSON, before it fails."""
    found = await made(program(tmp_path, text, **changes))
    assert found.stop is Stop.AGENT_FAILED and found.fault, found
    return json.loads(found.fault.partition(": ")[2])


@needs_walls
async def test_a_program_asks_the_model_and_does_in_its_home_what_it_does_elsewhere(tmp_path: Path) -> None:
    text = """
import multiprocessing, shutil, socket, ssl, subprocess, tempfile
for certificates in filter(None, ssl.get_default_verify_paths()[:1]):
    ssl.create_default_context(cafile=certificates)  # as clients do, whatever the address
with tempfile.NamedTemporaryFile('w', suffix='.py') as file:
    file.write('print(6 * 7)'); file.flush()
    said = subprocess.run([sys.executable, file.name], capture_output=True, text=True).stdout
assert os.environ['HOME'] == tempfile.gettempdir()
os.chdir(os.environ['HOME'])
open('one.sh', 'w').write('timeout 9 true && cp -p one.sh two.sh && echo said > /dev/null && touch -d yesterday one.sh')
os.chmod('one.sh', 0o700)
os.makedirs('folder/inner'); shutil.copy('one.sh', 'folder/inner'); shutil.copytree('folder', 'copy')
assert subprocess.run(['sh', '-c', '. ./one.sh']).returncode == 0
with multiprocessing.get_context('fork').Pool(1) as pool: pool.map(abs, [1])
socket.getaddrinfo('localhost', 80)
print(json.dumps({'reward': float(said) / 56}))
"""
    found = await made(program(tmp_path, text))
    assert found.outcome and found.outcome.reward == 0.75, found.fault
    assert len(found.turns) == 1


@needs_walls
async def test_a_command_is_read_where_path_finds_it(tmp_path: Path, monkeypatch: Any) -> None:
    (tool := tmp_path / "tool").write_text(f"#!{sys.executable}\n{SCRIPT}")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert (await made(named("tool", **GIVEN))).stop is Stop.ANSWERED


@needs_walls
async def test_connections_of_a_program_are_bounded(tmp_path: Path) -> None:
    text = """
import socket
place = ('127.0.0.1', int(os.environ['OPENAI_BASE_URL'].rpartition(':')[2].partition('/')[0]))
taken = [socket.create_connection(place) for _ in range(99)]
closed = 0
for each in taken:
    each.settimeout(0.2)
    try:
        while each.recv(4096): pass
        closed += 1
    except ConnectionError: closed += 1
    except TimeoutError: pass
sys.exit(json.dumps(closed))
"""
    assert 99 - MOST_CONNECTIONS <= await printed(tmp_path, text) < 99


@needs_walls
async def test_many_attempts_at_once_are_answered_each(tmp_path: Path) -> None:
    agent = program(tmp_path, "")
    (group,) = await roller(Told([ANSWER] * 4), agent=agent).roll([PROBLEM], attempts=4, seed=1)
    assert [one.stop for one in group.trajectories] == [Stop.ANSWERED] * 4, [one.fault for one in group.trajectories]


@needs_walls
async def test_nothing_outside_is_reached(tmp_path: Path) -> None:
    (secret := tmp_path / "secret").write_text("the answers")
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as local,
    ):
        local.bind(str(tmp_path / "local"))
        local.listen()
        tries = {
            "another server": f"socket.create_connection(('127.0.0.1', {other.getsockname()[1]}), 5)",
            "the internet": "socket.create_connection(('192.0.2.1', 80), 5)",
            "a datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53))",
            "a local socket": f"socket.socket(socket.AF_UNIX).connect({str(tmp_path / 'local')!r})",
            "a file": f"open({str(secret)!r})",
            "its folder": f"os.listdir({str(tmp_path)!r})",
            "a new file": f"open({str(tmp_path / 'new')!r}, 'w')",
            "its own script": f"open({str(tmp_path / 'own_agent.py')!r}, 'a')",
            "a mode": f"os.chmod({str(secret)!r}, 0o777)",
            "a time": f"os.utime({str(secret)!r})",
            "processes": "open('/proc/self/status')",
            "whether there are others": "os.stat('/proc/1')",
            "us": f"os.kill({os.getpid()}, 0)",
            "a keyring": "open('/etc/passwd')",
        }
        text = f"""
import socket
reached = []
for name, code in {tries!r}.items():
    try: eval(code)
    except OSError: continue  # a refused connection, a missing network or process, no permission
    reached.append(name)
sys.exit(json.dumps(reached))
"""
        assert await printed(tmp_path, text) == []
    assert secret.read_text() == "the answers" and not (tmp_path / "new").exists()


@needs_walls
async def test_it_reads_what_it_is_told_to(tmp_path: Path) -> None:
    (folder := tmp_path / "prompts").mkdir()
    (folder / "one").write_text("a prompt")
    text = f"sys.exit(json.dumps(open({str(folder / 'one')!r}).read()))\n"
    assert await printed(tmp_path, text, reads=(str(folder),)) == "a prompt"


@needs_walls
async def test_what_left_its_session_ends_with_it(tmp_path: Path) -> None:
    name = f"left-{os.getpid()}"
    child = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{name}'); time.sleep(600)"
    text = f"""
import subprocess, time
subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)
while not os.path.exists({str(tmp_path / "seen")!r}): time.sleep(0.05)
"""
    running = asyncio.create_task(made(program(tmp_path, text)))
    assert await asyncio.to_thread(eventually, lambda: name in _names())
    (tmp_path / "seen").touch()
    assert (await running).stop is Stop.ANSWERED
    assert name not in _names()


@needs_walls
async def test_no_home_is_left_of_a_program_that_writes_until_it_is_killed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    text = """
import itertools, os
for _ in range(4):
    os.fork()
os.setsid()
for number in itertools.count():
    folder = f"{os.environ['HOME']}/{os.getpid()}-{number % 100}"
    try: os.mkdir(folder); os.symlink('/etc', folder + '/link'); os.chmod(folder, 0)
    except FileExistsError: pass
"""
    found = await made(program(tmp_path, text, seconds=4.0))
    assert found.stop is Stop.AGENT_TIMEOUT
    # On a busy machine its processes may need longer to die than an attempt waits for them.
    assert await asyncio.to_thread(eventually, lambda: os.listdir(tmp_path) == ["own_agent.py"])


@needs_walls
def test_a_program_ends_with_the_run_that_is_killed(tmp_path: Path) -> None:
    name = f"kept-{os.getpid()}"
    given = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{name}'); time.sleep(600)"
    (tmp_path / "own_agent.py").write_text(given)
    killed = forked("tests.agents.test_walls:run", str(tmp_path), folder=tmp_path, files=[os.devnull] * 3)
    assert eventually(lambda: name in _names())
    killed.kill()
    assert eventually(lambda: name not in _names())


def run(folder: str) -> None:
    asyncio.run(made(named(f"{sys.executable} {folder}/own_agent.py", **GIVEN)))


def _names() -> list[str]:
    return [process.info["name"] for process in psutil.process_iter(["name"])]


@needs_walls
async def test_a_program_that_the_walls_hide_is_the_agents_failure(tmp_path: Path) -> None:
    (tool := tmp_path / "tool").write_text(f"#!{tmp_path}/interpreter\n")
    tool.chmod(0o755)
    shutil.copy("/bin/true", tmp_path / "interpreter")
    found = await made(named(str(tool), **GIVEN))
    assert found.stop is Stop.AGENT_FAILED and "it can't be started behind walls" in (found.fault or "")


@needs_walls
async def test_a_failure_is_told_by_its_first_line_and_with_what_the_program_may_read(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("")
    found = await made(program(tmp_path, "raise ValueError('first line\\n  two') from KeyError('one')\n"))
    assert str(found.fault).endswith("ended with exit code 1: ValueError: first line")
    found = await made(program(tmp_path, "import neighbour\n"))
    assert "No module named 'neighbour'; rollout.agent_reads lists what it may read" in str(found.fault)


async def test_walls_that_come_down_at_an_attempt_are_an_outage(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(walled, "why_not", lambda: "")
    monkeypatch.setattr(walled, "command", lambda *_: ("sh", "-c", "echo unshare: no space left >&2; exit 1"))
    found = await made(program(tmp_path, ""))
    assert found.stop is Stop.ENVIRONMENT_FAILED
    assert found.fault == f"{sys.executable} could not be started: unshare: no space left"


def test_walls_that_cannot_be_had_are_refused_before_anything_starts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(walled, "why_not", lambda: "unshare: Operation not permitted")
    with pytest.raises(ConfigError, match=r"cannot work here \(unshare.*set rollout.agent_walls = false"):
        program(tmp_path, "")
    with pytest.raises(ConfigError, match=r"rollout\.agent_reads names 'nowhere', which does not exist"):
        program(tmp_path, "", reads=("nowhere",))


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give up one capability of its own")
def test_root_in_a_container_without_cap_sys_admin_gets_walls_by_a_user_namespace(monkeypatch: Any) -> None:
    if not can_unshare(linux.CLONE_NEWUSER):
        pytest.skip("no user namespaces here")
    run = partial(subprocess.run, preexec_fn=partial(linux.prctl, linux.PR_CAPBSET_DROP, SYS_ADMIN, what="drop"))
    monkeypatch.setattr(subprocess, "run", run)
    assert walled.why_not() == ""


def can_unshare(flags: int) -> bool:
    """Whether a process without CAP_SYS_ADMIN gets these namespaces."""
    code = f"import os, ctypes; os._exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    dropped = partial(linux.prctl, linux.PR_CAPBSET_DROP, SYS_ADMIN, what="drop")
    return subprocess.run([sys.executable, "-c", code], preexec_fn=dropped).returncode == 0
