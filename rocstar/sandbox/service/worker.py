"""One worker process: a sandbox of its own, and the web server in front of it. Not here: starting workers
(`supervisor`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from rocstar.sandbox.client import SESSION_SLOTS, SandboxClient
from rocstar.sandbox.service.admission import Admission, Policy
from rocstar.sandbox.service.ledger import Ledger
from rocstar.sandbox.service.listeners import Listeners
from rocstar.sandbox.service.settings import Settings, share
from rocstar.sandbox.wire import Isolation, SandboxDown

MAX_SESSION_SLOTS = 128  # half of what the sandbox has numbers for


def work(settings: Settings, ledger: Ledger, number: int, listeners: Listeners, lifeline: int, started: float) -> None:
    """Serve until SIGTERM, or until `lifeline`, a pipe that the supervisor holds, closes. Raises SandboxDown when the
    sandbox cannot be started."""
    row = ledger.row(number)
    row.forget_gauges()
    row.add("starts")
    # The sandbox preloads in processes of its own: meanwhile the web server is loaded here. The thread that started
    # the sandbox stays until we end, for the kernel may take its end for ours.
    starter = ThreadPoolExecutor(1)
    starting = starter.submit(start_sandbox, settings)
    from rocstar.sandbox.service.hop import Hop
    from rocstar.sandbox.service.http import Service
    from rocstar.sandbox.service.protocol import raise_descriptor_limit
    from rocstar.sandbox.service.server import Server
    from rocstar.sandbox.service.sessions import SessionTable

    with starting.result() as client:
        raise_descriptor_limit()
        admission = Admission(client, policy_of(settings), row)
        service = Service(
            settings=settings,
            admission=admission,
            info=client.info,
            ledger=ledger,
            row=row,
            started=started,
            sessions=SessionTable(client, admission, settings, row, number),
            hop=Hop(number=number, workers=settings.workers, folder=listeners.folder, token=settings.token),
        )
        Server(service, client).run_until_told(listeners, number, lifeline)


def start_sandbox(settings: Settings) -> SandboxClient:
    """Raises SandboxDown."""
    slots = share(settings.slots, settings.workers)
    # Notebooks of one call run in as many slots as there are: sessions that pause between cells keep theirs beside.
    client = SandboxClient(
        slots=slots,
        preload=settings.preload,
        min_isolation=Isolation(settings.min_isolation),
        session_slots=min(SESSION_SLOTS + slots, MAX_SESSION_SLOTS),
    )
    try:
        client.launch()
        client.await_hello()
    except SandboxDown:
        client.close()
        raise
    return client


def policy_of(settings: Settings) -> Policy:
    return Policy(
        slots=share(settings.slots, settings.workers),
        runnable=share(settings.runnable, settings.workers),
        young_seconds=settings.young_seconds,
        max_queue=settings.max_queue,
    )
