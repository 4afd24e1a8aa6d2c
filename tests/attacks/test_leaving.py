"""Hostile programs that leave something behind for the next call or the machine."""

from __future__ import annotations

import pytest

from rocstar.sandbox.call import ProgramOutcome
from rocstar.sandbox.client import SandboxClient
from tests.attacks.support import REPOSITORY, attack, promised, tried


@pytest.mark.parametrize("folder", ["/", "/usr", "/usr/lib", "/etc", "/dev", "{prefix}", "{site}", "{source}"])
async def test_system_and_libraries_cannot_be_written(client: SandboxClient, folder: str) -> None:
    promised(client, "L2", "L3")
    import sys
    import sysconfig

    where = folder.format(prefix=sys.prefix, site=sysconfig.get_paths()["purelib"], source=REPOSITORY)
    # Harmless where the wall has a hole: an empty file of an odd name, and the mode that is there already.
    create = f"os.open({where + '/.rocstar-attack'!r}, os.O_CREAT | os.O_WRONLY)"
    change = f"os.chmod({where!r}, os.stat({where!r}).st_mode & 0o7777)"
    response = await attack(client, tried(create, change))
    refused = {"OSError", "PermissionError", "FileNotFoundError"}
    assert response.stdout.split()[0] in refused
    assert response.stdout.split()[-1] in refused


async def test_files_are_gone_for_the_next_call(client: SandboxClient) -> None:
    code = """
import os, tempfile
home = os.getcwd()
os.makedirs("a/b/c")
open("a/b/c/file", "w").write("left")
open(".hidden", "w").write("left")
os.symlink("/usr", "link")
os.symlink(home, "a/loop")
os.link(".hidden", "a/hard")
os.mkfifo("fifo")
tempfile.mkdtemp()
os.chmod("a/b", 0)
os.chmod("a", 0)
os.chmod(home, 0o700)
"""
    await attack(client, code)


async def test_folders_deeper_than_any_path_are_gone_too(client: SandboxClient) -> None:
    code = "import os\nfor n in range(300):\n    os.mkdir('x' * 20)\n    os.chdir('x' * 20)"
    assert (await attack(client, code)).outcome is ProgramOutcome.OK


async def test_names_that_are_not_text_are_gone_too(client: SandboxClient) -> None:
    await attack(client, "import os\nopen(b'\\xff\\n', 'w').close()\nos.mkdir(b'-rf \\xfe')")


async def test_disk_cannot_be_filled(client: SandboxClient) -> None:
    promised(client, "L3")
    code = """
import asyncio
import os
try:
    for n in range(8):
        with open(f"big{n}", "wb") as file:
            for _ in range(50):
                file.write(bytes(2**20))
except OSError as error:
    print(error.errno)
"""
    assert (await attack(client, code)).stdout == "28\n"


async def test_files_cannot_be_made_without_end(client: SandboxClient) -> None:
    promised(client, "L3")
    code = "try:\n    for n in range(10**5): open(str(n), 'w').close()\nexcept OSError as error: print(error.errno)"
    assert (await attack(client, code)).stdout == "28\n"
