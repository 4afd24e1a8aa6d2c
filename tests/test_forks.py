"""The process that forks commands for a session of tests."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from tests.forks import address, forked


def test_it_goes_on_where_the_one_who_asked_was_killed_before_its_answer(tmp_path: Path) -> None:
    asked = dict(act="builtins:print", folder=str(tmp_path), files=[os.devnull] * 3)
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(address())
        door.shutdown(socket.SHUT_RD)  # nobody is there to be answered
        door.sendall(json.dumps(dict(asked, given=[], environment={})).encode() + b"\n")
    process = forked(asked["act"], folder=tmp_path, files=asked["files"])
    process.join(60)
    assert process.exitcode == 0
