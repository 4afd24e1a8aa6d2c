"""What real programs do, behind every way to isolate: neither the walls nor the slot may stand in their way."""

from __future__ import annotations

import importlib.util

import pytest

from tests.sandbox.driver import Daemon

LIBRARIES = {
    "numpy": """
import numpy as np
a = np.random.default_rng(1).random((300, 300))
np.save("a.npy", a)
m = np.memmap("m", dtype="f8", mode="w+", shape=(100,)); m[:] = 1; m.flush()
print(np.allclose(np.load("a.npy", mmap_mode="r") @ np.linalg.inv(a), np.eye(300)), m.sum())
""",
    "scipy": """
from scipy import integrate, optimize, sparse, stats
from scipy.sparse.linalg import spsolve
print(round(integrate.quad(lambda x: x, 0, 1)[0], 3), round(optimize.brentq(lambda x: x - 2, 0, 5), 3),
      spsolve(sparse.eye(3).tocsc(), [1, 2, 3])[2], round(stats.norm.cdf(0), 3))
""",
    "pandas": """
import pandas as pd
f = pd.DataFrame({"a": [1, 2, 2], "b": list("xyz")})
f.to_csv("f.csv"); g = pd.read_csv("f.csv")
print(g.groupby("a").size().to_dict(), pd.Timestamp("2020-01-01").day_name())
""",
    "sympy": "import sympy as sp\nx = sp.symbols('x')\nprint(sp.integrate(sp.sin(x)**2, (x, 0, sp.pi)))",
    "matplotlib": """
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt, os
plt.plot([1, 2], [3, 4]); plt.savefig("p.png")
print(os.path.getsize("p.png") > 1000)
""",
}
PROGRAMS = {
    "threads": """
import queue, threading
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool: print(sum(pool.map(lambda n: n * n, range(100))))
lock, seen = threading.Condition(), queue.Queue()
def wait():
    with lock: lock.wait(5)
    seen.put(1)
t = threading.Thread(target=wait); t.start()
import time; time.sleep(0.05)
with lock: lock.notify_all()
t.join(); print(seen.get())
""",
    "subprocess": """
import subprocess, sys
code = "print(input()[::-1])"
print(subprocess.run([sys.executable, "-c", code], input="abc", text=True, capture_output=True).stdout)
print(subprocess.check_output("echo $((1 + 1)) | cat", shell=True, text=True))
""",
    "asyncio": """
import asyncio, socket, sys
async def main():
    a, b = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=a)
    other, back = await asyncio.open_connection(sock=b)
    back.writelines([b"hel", b"lo\\n"]); await back.drain()
    print(await reader.readline(), await asyncio.to_thread(sum, [1, 2]))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(3)", stdout=-1)
    print((await process.communicate())[0])
    await asyncio.wait_for(asyncio.sleep(0.01), 1)
    writer.close(); back.close()
asyncio.run(main())
""",
    "files and time": """
import datetime, mmap, os, pathlib, select, shutil, signal, tempfile, time
with tempfile.TemporaryDirectory() as folder:
    one = pathlib.Path(folder, "one"); one.write_text("text")
    shutil.copy(one, pathlib.Path(folder, "two")); shutil.copytree(folder, folder + "-")
    shutil.rmtree(folder + "-")
    shutil.make_archive("box", "zip", folder)
    print(sorted(os.listdir(folder)), one.stat().st_size)
with tempfile.NamedTemporaryFile() as file:
    file.truncate(8192)
    with mmap.mmap(file.fileno(), 0) as m: m[:2] = b"ab"; m.flush()
    file.seek(0); print(file.read(2))
signal.signal(signal.SIGALRM, lambda *_: print("rang")); signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)
read, write = os.pipe(); os.write(write, b"x"); print(select.select([read], [], [], 1)[0] == [read])
print(time.time() > 0, time.monotonic() > 0, time.process_time() >= 0, datetime.datetime.now().year > 2000)
""",
    "multiprocessing": """
import multiprocessing as mp
queue = mp.get_context("fork").SimpleQueue()
workers = [mp.get_context("fork").Process(target=lambda n: queue.put(n * n), args=(n,)) for n in range(3)]
[worker.start() for worker in workers]; [worker.join() for worker in workers]
print(sorted(queue.get() for _ in workers))
""",
    "sqlite": """
import sqlite3, subprocess, sys
for mode in ("delete", "wal"):
    one, two = (sqlite3.connect(f"{mode}.db") for _ in range(2))
    one.execute(f"pragma journal_mode={mode}")
    one.execute("create table t (x)")
    one.executemany("insert into t values (?)", [(n,) for n in range(100)])
    one.commit()
    add = f"import sqlite3; c = sqlite3.connect('{mode}.db'); c.execute('insert into t values (900)'); c.commit()"
    subprocess.run([sys.executable, "-c", add], check=True)
    print(two.execute("select sum(x) from t").fetchone())
""",
}
PRINTED = {"sqlite": "(5850,)\n(5850,)\n"}


def well(daemon: Daemon, program: str) -> str:
    """What it prints."""
    imports_late = f"exec(bytes.fromhex({program.encode().hex()!r}))"  # no tier is chosen by what it names
    seen = daemon.run(imports_late, memory_bytes=2**31, cpu_seconds=60.0, wall_seconds=60.0)
    assert seen.outcome == "ok", seen
    assert seen.stdout and "False" not in seen.stdout
    return seen.stdout


def test_libraries_do_what_they_do_elsewhere(daemon: Daemon) -> None:
    there = [program for name, program in LIBRARIES.items() if importlib.util.find_spec(name) is not None]
    if not there:
        pytest.skip(f"none of {', '.join(LIBRARIES)} is installed")
    assert len(well(daemon, "\n".join(there)).splitlines()) == len(there)


@pytest.mark.parametrize("name", PROGRAMS)
def test_real_programs_do_what_they_do_elsewhere(daemon: Daemon, name: str) -> None:
    if name == "multiprocessing" and daemon.info.isolation < "L3":
        pytest.skip("its semaphores need /dev/shm, which is there in L3 only")
    if name == "files and time" and "same_user" in daemon.info.failed_probes:
        pytest.skip("what copies the modes of files is refused where programs run as the user who started the sandbox")
    said = well(daemon, PROGRAMS[name])
    assert PRINTED.get(name, said) == said
