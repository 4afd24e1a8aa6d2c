"""What a dump of stacks shows."""

from __future__ import annotations

import asyncio
import threading

from rocstar.support.watch import all_stacks, awaited


async def outer(go: asyncio.Event) -> None:
    await inner(go)


async def inner(go: asyncio.Event) -> None:
    await go.wait()


async def test_a_task_is_shown_down_to_what_it_waits_for_outermost_first() -> None:
    go = asyncio.Event()
    task = asyncio.create_task(outer(go))
    await asyncio.sleep(0)
    assert [place.rsplit(" in ", 1)[1] for place in awaited(task)] == ["outer", "inner", "Event.wait"]
    go.set()
    await task
    assert awaited(task) == ()


async def test_tasks_that_stand_in_the_same_place_are_shown_once() -> None:
    go = asyncio.Event()
    tasks = [asyncio.create_task(outer(go), name=f"attempt {n}") for n in range(5)]
    await asyncio.sleep(0)
    text = all_stacks(asyncio.get_running_loop())
    assert "5 tasks (attempt 0, attempt 1, attempt 2, ...)" in text
    assert text.split("\n\nthread ")[0].count("in inner") == 1
    go.set()
    await asyncio.gather(*tasks)


async def test_threads_are_shown_by_name_with_where_they_stand() -> None:
    go = threading.Event()

    def wait_for_the_writer() -> None:
        go.wait()

    thread = threading.Thread(target=wait_for_the_writer, name="the writer")
    thread.start()
    text = all_stacks(asyncio.get_running_loop())
    go.set()
    thread.join()
    assert "thread the writer\n" in text and "wait_for_the_writer" in text
