"""A relay between a client and a worker that breaks off, stalls or lies as a test wants it to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
    """Listens on loopback and passes on what comes, to `target` and back.

    `to_worker`, `to_client`: functions of a piece of data, and of how many bytes have gone that way
    before, that give what is passed on in its place; None ends both connections.
    """

    def __init__(
        self,
        target: str,
        to_worker: Callable[[bytes, int], bytes | None] | None = None,
        to_client: Callable[[bytes, int], bytes | None] | None = None,
    ) -> None:
        host, port = target.rsplit(":", 1)
        self.target = host, int(port)
        self.to_worker, self.to_client = to_worker, to_client
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                worker = socket.create_connection(self.target)
                self.sockets += [client, worker]
                for one, other, change in (
                    (client, worker, "to_worker"),
                    (worker, client, "to_client"),
                ):
                    thread = threading.Thread(
                        target=self._pass_on, args=(one, other, change), daemon=True
                    )
                    thread.start()

    def _pass_on(self, one: socket.socket, other: socket.socket, change: str) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                function = getattr(self, change)  # it may be set meanwhile
                changed = data if function is None else function(data, passed)
                if changed is None:
                    break
                passed += len(data)
                other.sendall(changed)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Speaker:
    """Listens on loopback and says the same to all who connect; then hangs up, or does not."""

    def __init__(self, words: bytes, hang_up: bool = True) -> None:
        self.words, self.hang_up = words, hang_up
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                self.clients.append(client)
                client.sendall(self.words)
                if self.hang_up:
                    client.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Speaker:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        for client in self.clients:
            client.close()
