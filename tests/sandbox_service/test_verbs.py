"""`rocstar sandbox ...`, as typed."""

from __future__ import annotations

import json
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rocstar.cli import main as cli
from rocstar.support import exits
from tests.sandbox_service.support import RunningService


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = exits.OK) -> str:
    assert cli.run(["sandbox", *arguments]) == code
    return capsys.readouterr().out


def test_exec_runs_here_or_on_a_service(service: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    for where in ((), ("--url", service.url)):
        assert said(capsys, "exec", "print(1)\n2", *where) == "1\n2\n"
        answer = json.loads(said(capsys, "exec", "3", *where, "--json"))
        assert (answer["outcome"], answer["value"], answer["stdout"], answer["signal"]) == ("ok", "3", "", None)
    said(capsys, "exec", "1/0", *where, code=exits.FAILED)


def test_exec_runs_a_file_and_says_which_one_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin (1).py").write_bytes(b"# coding: latin-1\r\nprint('\xe9')\r\n6 * 7")
    assert said(capsys, "exec", "latin (1).py") == "é\n42\n"
    Path("p.py").write_bytes(b"print('\xe9')")
    for name, sentence in (("absent.py", "absent.py cannot be read (No such file"), ("p.py", "in p.py is no text")):
        assert cli.run(["sandbox", "exec", name]) == exits.USAGE
        assert sentence in capsys.readouterr().err


def test_probe_and_status_say_how_well_programs_are_walled_off(
    service: RunningService, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in (("probe",), ("probe", "--url", service.url), ("status", service.url)):
        assert "isolation         L" in said(capsys, *asked)
        assert json.loads(said(capsys, *asked, "--json"))["slots"] >= 1


def test_a_token_does_not_follow_a_redirect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROCSTAR_SANDBOX_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as place, socket.create_server(("127.0.0.1", 0)) as other:
        place.settimeout(60)
        url, elsewhere = (f"http://127.0.0.1:{one.getsockname()[1]}" for one in (place, other))

        def redirect() -> None:
            with place.accept()[0] as asked:
                asked.recv(4096)
                asked.sendall(f"HTTP/1.1 302 Found\r\nlocation: {elsewhere}\r\ncontent-length: 0\r\n\r\n".encode())

        with ThreadPoolExecutor(1) as thread:
            thread.submit(redirect)
            assert cli.run(["sandbox", "status", url]) == exits.NOT_READY
        assert f"no sandbox service answers at {url} (302 Found)" in capsys.readouterr().err
        assert select.select([other], [], [], 0)[0] == [], "nobody connected"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["serve", "--host", "0.0.0.0"], exits.USAGE, "set ROCSTAR_SANDBOX_TOKEN"),
        (["serve", "--host", "203.0.113.7", "--open-to-network"], exits.USAGE, "address); choose another --host or"),
        (["serve", "--memory-mb", "1"], exits.USAGE, "limit memory_bytes must be from 4194304 to"),
        (["serve", "--slots", "-1"], exits.USAGE, "--slots -1"),
        (["serve", "--join", "http://127.0.0.1:9"], exits.USAGE, "no such option: --join"),
        (["serve", "--token-file", "/no/such/file"], exits.USAGE, "--token-file /no/such/file cannot be read"),
        (["serve", "--token-file", "/dev/null"], exits.USAGE, "--token-file /dev/null is empty"),
        (["serve", "--wall-seconds", "0"], exits.USAGE, "--wall-seconds and --memory-mb must be above 0"),
        (["status", "http://127.0.0.1:9"], exits.NOT_READY, "no sandbox service answers at http://127.0.0.1:9"),
        (["status", "x"], exits.USAGE, "'x' is no address of a service"),
        (["exec", "1", "--url", "ftp://x"], exits.NOT_READY, "'ftp://x' is no address of a sandbox"),
        (["exec", "1", "--url", "http://127.0.0.1:9"], exits.NOT_READY, "http://127.0.0.1:9 does not serve"),
    ],
)
def test_what_goes_wrong_is_one_sentence(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["sandbox", *arguments]) == code
    complaint = capsys.readouterr().err.strip()
    assert sentence in complaint and "\n" not in complaint


def test_the_token_comes_from_a_file_or_the_environment_and_is_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rocstar.cli.verbs.sandbox import _token

    monkeypatch.setenv("ROCSTAR_SANDBOX_TOKEN", "from the environment")
    (tmp_path / "token").write_text("from the file\n")
    assert (_token(None), _token(tmp_path / "token")) == ("from the environment", "from the file")
    assert cli.run(["sandbox", "serve", "--token", "secret"]) == exits.USAGE


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(exits.EXTRA_OF, "no_such_package", "sandbox")
    assert cli.run(["sandbox", "serve"]) == exits.NOT_READY
    complaint = capsys.readouterr().err
    assert (
        "no_such_package is not installed; install what is missing with: " in complaint
        and "sandbox" in complaint.rpartition(" ")[2]
    )
