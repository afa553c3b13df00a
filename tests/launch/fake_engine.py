"""An engine stand-in that can be told to misbehave. Runs in a bare interpreter: `python -I -S fake_engine.py PORT …`.

`exit=N` ends at once with that status; `unready` answers 503; `stubborn` ignores SIGTERM; `family` has a child and a
grandchild in a session of its own that was orphaned on purpose, both of which ignore SIGTERM; `polite` says goodbye on
SIGTERM; `first=FILE` behaves only when FILE is not there yet (and makes it), else exits with 5; `spare=FILE` is the
other way round: exits with 5 the first time. GET /exit ends it with 7, GET /die with SIGKILL.
"""

import os
import signal
import socket
import sys


def family() -> None:
    """Prints the pids of a child and of an orphaned grandchild in its own session."""
    read, write = os.pipe()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(write, f"{os.getpid()}\n".encode())
            while True:
                signal.pause()
        os.wait()
        os.write(write, f"{os.getpid()}\n".encode())
        while True:
            signal.pause()
    with os.fdopen(read) as lines:
        print("family", lines.readline().strip(), lines.readline().strip(), flush=True)


def once(file: str) -> bool:
    """True the first time."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def bye(*_: object) -> None:
    print("goodbye", flush=True)
    os._exit(0)


def main(port: int, modes: list[str]) -> None:
    options = dict(mode.partition("=")[::2] for mode in modes)
    print("starting", *modes, flush=True)
    if "stubborn" in options:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "polite" in options:
        signal.signal(signal.SIGTERM, bye)
    if "family" in options:
        family()
    if ("first" in options and not once(options["first"])) or ("spare" in options and once(options["spare"])):
        print("no luck this time", flush=True)
        os._exit(5)
    if "exit" in options:
        print("cannot go on", file=sys.stderr, flush=True)
        os._exit(int(options["exit"]))
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen()
    while True:
        client, _ = server.accept()
        path = client.recv(4096).split(b" ")[1]
        if path == b"/die":
            os.kill(os.getpid(), signal.SIGKILL)
        if path == b"/exit":
            os._exit(7)
        status = b"503 No" if "unready" in options else b"200 OK"
        client.sendall(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        client.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
