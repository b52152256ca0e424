"""A light client in a process of its own: one request at a time on a plain socket, on a schedule.

It asks the server to train, or not to, window by window, and prints what it saw as JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any, final

SETTLE_S = 0.3
FEATURES = 64
TIMEOUT_S = 60


@final
class Connection:
    """HTTP/1.1 over one socket that is kept open."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, body: bytes) -> bytes:
        """Send a body and return the answer's."""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._more()
        top, _, answer = received.partition(b"\r\n\r\n")
        lines = top.lower().split(b"\r\n")
        length = next(int(x.split(b":")[1]) for x in lines if x.startswith(b"content-length:"))
        while len(answer) < length:
            answer += self._more()
        if lines[0].split()[1] not in {b"200", b"202"}:
            raise RuntimeError(f"{path} was answered with {lines[0]!r}: {answer[:200]!r}")
        return answer

    def _more(self) -> bytes:
        piece = self._socket.recv(65536)
        if not piece:
            raise ConnectionError("The server has closed the connection.")
        return piece


def window(connection: Connection, *, is_training: bool, seconds: float, rate: float) -> Any:
    """Ask for predictions for some seconds; return percentiles in ms, and the loop's lag."""
    connection.post("/train", json.dumps(is_training).encode())
    time.sleep(SETTLE_S)
    connection.post("/lag", b"0")  # begins anew
    body = json.dumps({"input": [i / FEATURES for i in range(FEATURES)]}).encode()
    taken, versions, due = [], [], time.perf_counter()
    end = due + seconds
    while due < end:
        time.sleep(max(due - time.perf_counter(), 0))
        start = time.perf_counter()
        answer = connection.post("/predict", body)
        taken.append(time.perf_counter() - start)
        versions.append(json.loads(answer)["version"])
        due = max(due + 1 / rate, start)
    lag = json.loads(connection.post("/lag", b"0"))
    taken.sort()
    return {
        "p50": taken[len(taken) // 2] * 1e3,
        "p99": taken[min(int(len(taken) * 0.99), len(taken) - 1)] * 1e3,
        "count": len(taken),
        "is_ordered": versions == sorted(versions),
        **lag,
    }


def main(port: int, num_rounds: int, seconds: float, rate: float) -> None:
    """Print a line per round: idle, training, idle again."""
    connection = Connection(port)
    for number in range(num_rounds + 1):
        found = [
            window(connection, is_training=kind == 1, seconds=seconds, rate=rate)
            for kind in range(3)
        ]
        if number > 0:  # the first one warms up
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
