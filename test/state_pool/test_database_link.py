"""`DatabaseLink`: a database link that can be cut for one process."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from test.database_link import _SOCKET, DatabaseLink
from test.serving import wait_for


@pytest.mark.parametrize("is_ours", [True, False])
def test_data_sent_over_a_cut_link_arrives_later(tmp_path: Path, is_ours: bool) -> None:
    client_folder, server_folder = tmp_path / "ours", tmp_path / "server"
    client_folder.mkdir()
    server_folder.mkdir()
    with socket.create_server(str(server_folder / _SOCKET), family=socket.AF_UNIX) as listener:
        link = DatabaseLink(client_folder, server_folder)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(client_folder / _SOCKET))
            server, _ = listener.accept()
            with server:
                client.sendall(b"a")
                assert server.recv(1) == b"a" and link.held == 0
                link.cut(os.getpid() if is_ours else 1)
                client.sendall(b"b")
                if is_ours:
                    wait_for(lambda: link.held == 1, 10, "it is held back")
                    link.mend()
                assert server.recv(1) == b"b" and link.held == is_ours
        link.close()
