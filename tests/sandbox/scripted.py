"""A daemon that runs nothing: it speaks frames and does what the code of a call says. Threads behind a WebSocket."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from contextlib import suppress

from websockets.sync.server import ServerConnection, serve

from rocstar.sandbox import wire
from rocstar.sandbox.call import Call, DaemonInfo, Isolation, Outcome, ProgramOutcome, Response, ServiceOutcome, Usage
from rocstar.sandbox.wire import Frame, FrameKind, FrameReader

INFO = DaemonInfo(isolation=Isolation.L3, slots=2)


class ScriptedDaemon:
    """Codes: `ok`, `internal`, `overloaded`, `once WORD` (WORD the first time, else ok), `second WORD`, `die` (closes
    the connection), `hang`, `garbage`, `deep` (nested without end), `state_lost`, `closed`, `another` (the result of
    another call). Cells are answered LOST unless the session was begun by cell 1."""

    def __init__(self, info: DaemonInfo = INFO, *, name: str = "") -> None:
        self.info, self.name = info, name
        self.calls: list[Call] = []
        self.frames: list[Frame] = []
        self.sessions: Counter[str] = Counter()
        self.hold = threading.Event()
        """While it is clear, `wait` is not answered."""
        self._seen: Counter[str] = Counter()
        self._links: list[socket.socket] = []
        self._server = serve(self._serve, "127.0.0.1", 0, compression=None, ping_interval=None)
        self.address = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """As if it had been killed."""
        self._server.shutdown()
        self.drop()

    def drop(self) -> None:
        """Break the connections."""
        links, self._links = self._links, []
        self.sessions.clear()
        for link in links:
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> ScriptedDaemon:
        return self

    def __exit__(self, *error: object) -> None:
        self.hold.set()
        self.close()

    def _serve(self, connection: ServerConnection) -> None:
        """One connection, until it ends."""
        self._links.append(connection.socket)
        connection.send(wire.pack(FrameKind.HELLO, 0, wire.encode(self.info)))
        reader = FrameReader()
        for data in connection:
            assert isinstance(data, bytes)
            for frame in reader.feed(data):
                self.frames.append(frame)
                reply = self._reply(frame)
                if reply is None:
                    connection.socket.shutdown(socket.SHUT_RDWR)
                    return
                connection.send(reply)

    def _reply(self, frame: Frame) -> bytes | None:
        if frame.kind is FrameKind.PING:
            return wire.pack(FrameKind.USAGE, 0, wire.encode(Usage(cpu_seconds=1.5)))
        if frame.kind is not FrameKind.CALL:
            return b""
        call = wire.decode_call(frame.body)
        self.calls.append(call)
        self._seen[call.id] += 1
        word, _, rest = call.code.partition(" ")
        if word in ("once", "second"):
            word = rest if self._seen[call.id] == ("once", "second").index(word) + 1 else "ok"
        if word == "wait":
            self.hold.wait()
        if call.session and not self._holds(call):
            return wire.pack(FrameKind.LOST, frame.number)
        if word in ("die", "hang", "garbage", "deep"):
            deep = wire.pack(FrameKind.RESPONSE, frame.number, b"\x81\xa0" + b"\x91" * 10**5)
            return {"die": None, "hang": b"", "garbage": b"\xff" * 40, "deep": deep}[word]
        outcome: Outcome = ProgramOutcome.OK
        if word in ("internal", "overloaded"):
            outcome = ServiceOutcome(word)
        elif word == "closed":
            outcome = ServiceOutcome.CANCELLED
        elif word == "state_lost":
            outcome = ProgramOutcome.WALL_TIMEOUT
            self.sessions.pop(call.session)
        response = Response(
            id=word if word == "another" else call.id,
            outcome=outcome,
            stdout=call.code,
            message="its session was closed" if word == "closed" else "",
            node=self.name,
            state_lost=word == "state_lost",
        )
        return wire.pack(FrameKind.RESPONSE, frame.number, wire.encode(response))

    def _holds(self, call: Call) -> bool:
        if call.cell != 1 and call.session not in self.sessions:
            return False
        self.sessions[call.session] += 1
        return True
