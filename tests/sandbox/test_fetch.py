"""Files that a plain call sends back, and those it must not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocstar.sandbox import fetch
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import Limits, ProgramOutcome, Request, Response
from tests.sandbox.ways import LISTING, NAMES, WAYS, started


@pytest.fixture(scope="module", params=WAYS, ids=NAMES)
def walled(request: pytest.FixtureRequest) -> Iterator[SandboxClient]:
    yield from started(request.param)


async def run(client: SandboxClient, code: str, *names: str, **limits: float) -> Response:
    bounds = Limits(**{"wall_seconds": 20.0, "cpu_seconds": 10.0} | limits)  # type: ignore[arg-type]
    return await client.run(Request(id="fetch", code=code, fetch=names, limits=bounds))


async def test_files_come_back_as_they_were_written_and_the_next_program_finds_none(walled: SandboxClient) -> None:
    raw = bytes(range(256)) * 4096
    code = f"import os\nos.makedirs('a/b')\nopen('a/b/raw', 'wb').write(bytes(range(256)) * {len(raw) // 256})\n"
    response = await run(walled, code + "open('ä.txt', 'w').write('ö');", "a/b/raw", "ä.txt", "./a/../ä.txt", "none")
    assert dict(response.files) == {"a/b/raw": raw, "ä.txt": "ö".encode(), "./a/../ä.txt": "ö".encode()}
    assert (await run(walled, LISTING, "ä.txt")).value == "[]"


async def test_a_file_that_was_put_in_comes_back_without_being_touched(walled: SandboxClient) -> None:
    request = Request(id="echo", code="1", files={"in": b"\x00\xff"}, fetch=["in"])
    assert dict((await walled.run(request)).files) == {"in": b"\x00\xff"}


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("raise ValueError", ProgramOutcome.EXCEPTION),
        ("import os\nos._exit(3)", ProgramOutcome.EXIT_NONZERO),
        ("while True: pass", ProgramOutcome.WALL_TIMEOUT),
        ("while True: print('y' * 1000)", ProgramOutcome.OUTPUT_LIMIT),
    ],
)
async def test_what_a_program_wrote_before_its_bad_end_comes_back(
    walled: SandboxClient, end: str, outcome: ProgramOutcome
) -> None:
    response = await run(walled, f"with open('f', 'w') as f: f.write('x')\n{end}", "f", wall_seconds=1.0)
    assert (response.outcome, dict(response.files)) == (outcome, {"f": b"x"})


async def test_what_is_not_a_file_below_the_working_directory_does_not_come_back(walled: SandboxClient) -> None:
    code = """
import os
inside = os.path.abspath("real")
open("real", "w").write("r")
os.mkdir("folder")
open("folder/f", "w").write("f")
os.symlink(os.__file__, "link")
os.symlink("real", "near")
os.symlink("/", "root")
os.symlink("folder", "way")
os.symlink("..", "up")
os.mkfifo("pipe")
"""
    names = ["link", "near", "root/etc/passwd", "way/f", "up/etc/passwd", "pipe", "folder", ".", "", "a\0b"]
    names += ["/etc/passwd", "../etc/passwd", "folder/../../etc/passwd", "/dev/zero", "real/", "folder/f"]
    response = await run(walled, code, *names)
    assert response.outcome is ProgramOutcome.OK, response.stderr
    assert dict(response.files) == {"real/": b"r", "folder/f": b"f"}


async def test_more_than_the_bound_is_left_out_and_the_rest_still_comes(walled: SandboxClient) -> None:
    code = f"""
for name, size in (("huge", {fetch.MAX_BYTES + 1}), ("most", {fetch.MAX_BYTES - 1}), ("two", 2), ("one", 1)):
    with open(name, "wb") as file:
        file.truncate(size)
"""
    response = await run(walled, code, "huge", "most", "two", "one")
    assert {name: len(content) for name, content in response.files.items()} == {"most": fetch.MAX_BYTES - 1, "one": 1}
    assert (await run(walled, "1 + 1")).value == "2"


async def test_a_folder_too_deep_for_a_path_can_be_left_behind(walled: SandboxClient) -> None:
    code = "import os\nfor _ in range(60):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\nopen('f', 'w').write('x')"
    response = await run(walled, code, "/".join(["d" * 200] * 60) + "/f")
    assert set(response.files.values()) == {b"x"}
    assert (await run(walled, LISTING)).value == "[]"


async def test_a_program_that_goes_on_in_the_background_changes_nothing_that_comes_back(walled: SandboxClient) -> None:
    code = """
import os, time
open("f", "w").write("parent")
if os.fork() == 0:
    os.setsid()
    for _ in range(1000):
        open("f", "w").write("child")
        time.sleep(0.01)
"""
    response = await run(walled, code, "f")
    assert response.files["f"] in (b"parent", b"child", b"")
    assert (await run(walled, LISTING)).value == "[]"


async def test_a_program_cannot_put_files_into_its_answer_by_what_it_prints(walled: SandboxClient) -> None:
    code = 'import sys\nopen("f", "w").close()\nprint(\'{"f": "eA==", "g": "eA=="}\', flush=True)'
    assert dict((await run(walled, code, "f", "g")).files) == {"f": b""}


async def test_too_many_names_are_refused(walled: SandboxClient) -> None:
    response = await run(walled, "1", *(f"file-{n}" for n in range(20_000)))
    assert response.outcome is ProgramOutcome.REJECTED and "fetch" in response.message


def test_a_link_that_takes_the_place_of_a_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    os.symlink(tmp_path / "outside", "folder")
    assert fetch.fetched(["folder/secret", "../outside/secret", str(tmp_path / "outside" / "secret")]) == {}
