"""A port to listen at."""

from __future__ import annotations

import socket


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at host and port; port 0: any that is free.

    Raises:
      ValueError: nobody can listen there, as where the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        raise ValueError(f"can't listen at {host}:{port} ({error.strerror}); give another --port or --host") from error
    return listener
