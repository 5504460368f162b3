"""Decides whether nginx runs in front. Writes its configuration and runs it in a process.

The process ends together with nginx, so the supervisor monitors it like the other processes. If the supervisor is
killed, nginx ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from native.files import TemporaryFolder
from programs.settings import Settings
from routes.config import PROXY_KEY_HEADER, HttpConfig
from routes.serving.browser import ANY, BrowserRules
from rwkv_batch.errors import StartupError
from rwkv_batch.ipc.process import LogConfig, become_child

logger = logging.getLogger("nginx")

_SYSTEM_PATHS = "/usr/sbin:/usr/local/sbin:/sbin"
"""Folders of nginx that may be missing in a user's PATH."""
_MAX_CONNECTIONS = 16_384
_RESERVED_FILES = 64
"""Descriptors of an nginx process besides its connections."""
_OPENAI_PREFIX = "/openai/"
FORM_PATHS = (
    "/v1/states",
    "/v1/adapters",
    "/openai/v1/files",
    "/translate/v1/documents",
    "/v2/document",
    "/translate_file",
)
"""Paths that take forms. Robyn parses every form, before authentication, and answers 500 to a malformed one."""
DEEPL_TRANSLATE = "/v2/translate"
_SMALL = r"(?:\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-6])?"
"""Lengths of bodies that need no secret in the header: up to MAX_ANONYMOUS_BYTES, which is 65536."""
_PR_SET_PDEATHSIG = 1
_UPSTREAM_IDLE_S = 10
"""Idle seconds of a connection to a worker. Robyn never closes idle ones, so none closes during use."""


def find_nginx(settings: Settings) -> str | None:
    """Returns the path of nginx, or None without a front. Raises StartupError if nginx is required but missing."""
    front, host = settings.service.front, settings.http.host
    is_public = not ipaddress.ip_address(host).is_loopback
    if front == "none" or (front == "auto" and not is_public):
        return None
    path = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), _SYSTEM_PATHS]))
    if path is None and front == "nginx":
        raise StartupError("--front nginx: nginx is not installed (Debian, Ubuntu: apt-get install nginx-light)")
    if path is None:
        logger.warning(
            "NO PROXY IN FRONT: %s is reachable from outside. One malformed packet ends an HTTP worker with all "
            "its streams. Install nginx (apt-get install nginx-light), or give --front none if your own proxy "
            "buffers requests",
            host,
        )
    return path


class NginxConfig(msgspec.Struct, frozen=True, kw_only=True):
    program: str
    http: HttpConfig
    worker_ports: list[int]

    @classmethod
    def build(cls, settings: Settings, workers: list[socket.socket]) -> NginxConfig:
        """Builds the values from the settings and the workers' sockets. Raises StartupError without nginx."""
        program = find_nginx(settings)
        if program is None:
            raise StartupError("nginx is not installed; install it or start with --front none")
        ports = [worker.getsockname()[1] for worker in workers]
        return cls(program=program, http=settings.http, worker_ports=ports)

    @property
    def body_mb(self) -> float:
        """Largest body of any route in MiB."""
        return max(self.http.max_body_mb, self.http.max_state_mb)

    @property
    def connections_per_client(self) -> int:
        return (self.http.max_streams_per_client or self.http.max_streams) * len(self.worker_ports)

    def render(self, folder: str) -> str:
        """Returns the text of nginx.conf. nginx writes into `folder` only."""
        http, origins = self.http, BrowserRules(self.http).origins
        connections = min(_MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - _RESERVED_FILES)
        return _MAIN.format(
            processes=max(1, min(4, (os.cpu_count() or 1) // 2)),
            files=connections + _RESERVED_FILES,
            connections=connections,
            folder=folder,
            body_bytes=int(self.body_mb * 1024 * 1024),
            stall=max(1, round(http.stall_timeout_s)),
            drain=max(1, round(http.drain_timeout_s)),
            per_client=self.connections_per_client,
            trusted="".join(f"    set_real_ip_from {network};\n" for network in http.trusted_proxies),
            servers="".join(f"        server 127.0.0.1:{port} max_fails=0;\n" for port in self.worker_ports),
            idle=_UPSTREAM_IDLE_S,
            deepl=DEEPL_TRANSLATE,
            listen=f"[{http.host}]:{http.port}" if ":" in http.host else f"{http.host}:{http.port}",
            any_origin=_quoted(ANY if ANY in origins else ""),
            origins="".join(f"        {_quoted(one)} {_quoted(one)};\n" for one in origins if one != ANY),
            small=_SMALL,
            check=_CHECK if http.password or http.keys_file else "",
            form_paths="|".join(map(re.escape, FORM_PATHS)),
            key_header=PROXY_KEY_HEADER,
            key=http.proxy_key,
            errors="".join(self._error(*one) for one in self._nginx_errors()),
        )

    def _nginx_errors(self) -> list[tuple[int, str, str, int]]:
        """Returns nginx's own error answers: status, OpenAI error type, message, Retry-After in seconds."""
        limit = f"{self.connections_per_client} (--max-streams-per-client)"
        refused = "Unauthorized: invalid or missing password or key"
        lost = "no HTTP worker answers: the service is starting, or replaces a lost one; retry the request"
        silent = "the HTTP worker process does not answer; retry the request, and see the server's log"
        large = f"{refused}; a body above 65536 bytes or in chunks needs it as a header, Authorization: Bearer"
        return [
            (401, "authentication_error", large, 0),
            (413, "invalid_request_error", f"the body is larger than {self.body_mb:g} MiB (--max-body-mb)", 0),
            (429, "rate_limit_error", f"too many requests of one client at a time, the limit is {limit}", 1),
            (500, "server_error", "the password could not be checked; retry the request", 1),
            (502, "server_error", lost, 1),
            (504, "server_error", silent, 1),
        ]

    def _error(self, status: int, kind: str, message: str, retry_s: int) -> str:
        openai = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        return _ERROR.format(
            status=status,
            native=_quoted(json.dumps({"error": message})),
            openai=_quoted(json.dumps(openai)),
            prefix=_OPENAI_PREFIX,
            retry=f"            add_header Retry-After {retry_s} always;\n" if retry_s else "",
        )


def _quoted(text: str) -> str:
    """Quotes a string for nginx's configuration."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_MAIN = """\
daemon off;
worker_processes {processes};
worker_rlimit_nofile {files};
worker_shutdown_timeout {drain}s;
pid {folder}/nginx.pid;
error_log stderr error;
events {{
    worker_connections {connections};
}}
http {{
    access_log off;
    server_tokens off;
    default_type application/json;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;

    client_header_timeout 10s;
    client_body_timeout 30s;
    keepalive_timeout 75s;
    keepalive_requests 100000;
    send_timeout {stall}s;
    reset_timedout_connection on;
    large_client_header_buffers 4 16k;
    client_max_body_size {body_bytes};
    client_body_buffer_size 256k;
    limit_conn_zone $binary_remote_addr zone=clients:10m;
    limit_conn clients {per_client};
    limit_conn_status 429;
    real_ip_header X-Forwarded-For;
    real_ip_recursive on;
{trusted}
    map_hash_bucket_size 512;
    map "$uri $http_content_type" $worker_content_type {{
        default $http_content_type;
        "~*^(?!(?:{form_paths}) ).* multipart/form-data" "";
    }}
    map $http_origin $allowed_origin {{
        default {any_origin};
{origins}    }}
    map "$content_length:$http_transfer_encoding" $is_small {{
        default "";
        "~^{small}:$" 1;
    }}
    upstream workers {{
        least_conn;
{servers}        keepalive 128;
        keepalive_timeout {idle}s;
    }}
    upstream repeating {{
        # DeepL's clients repeat a slow request while it runs. The same worker then gives both the same answer.
        hash "$remote_addr $http_authorization $content_length";
{servers}        keepalive 128;
        keepalive_timeout {idle}s;
    }}
    map $uri $upstream {{
        default workers;
        {deepl} repeating;
    }}
    server {{
        listen {listen};
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $http_host;
        proxy_set_header X-Forwarded-For $remote_addr;
        proxy_set_header Content-Type $worker_content_type;
        proxy_set_header {key_header} {key};
        location = /own-authz {{
            # A large body is read only after a worker has checked the secret in the header.
            internal;
            if ($is_small) {{
                return 204;
            }}
            proxy_pass http://workers/authz;
            proxy_pass_request_body off;
            proxy_set_header Connection "";
            proxy_set_header Host localhost;
            proxy_set_header X-Forwarded-For $remote_addr;
            proxy_set_header Content-Length "";
            proxy_set_header Content-Type "";
            proxy_set_header {key_header} {key};
        }}
        location / {{
{check}            proxy_pass http://$upstream;
            proxy_request_buffering on;
            proxy_buffering off;
            proxy_connect_timeout 30s;
            proxy_send_timeout 60s;
            proxy_read_timeout 3600s;
        }}
{errors}    }}
}}
"""
_CHECK = """\
            auth_request /own-authz;
"""
_ERROR = """\
        error_page {status} @own{status};
        location @own{status} {{
            add_header Access-Control-Allow-Origin $allowed_origin always;
{retry}            if ($request_uri ~ ^{prefix}) {{
                return {status} {openai};
            }}
            return {status} {native};
        }}
"""


def nginx_process(
    config: NginxConfig, listener: socket.socket, log_config: LogConfig, name: str, supervisor: Connection
) -> None:
    """Main function of the process: run nginx until it ends.

    On "quit" from the supervisor, nginx finishes its answers first. If the supervisor dies, nginx is killed at once.
    """
    become_child(name, log_config)
    folder = TemporaryFolder("nginx")
    Path(folder.path).chmod(0o711)  # nginx started by root runs as another user, who needs access to these folders
    try:
        code = _run(config, listener, folder.path, supervisor)
    finally:
        folder.remove()
    sys.exit(code)


def _run(config: NginxConfig, listener: socket.socket, folder: str, supervisor: Connection) -> int:
    path = Path(folder, "nginx.conf")
    path.touch(mode=0o600)
    path.write_text(config.render(folder), encoding="utf-8")
    command = [config.program, "-p", folder, "-c", str(path), "-e", "stderr"]
    if (reason := _config_error(command)) is not None:
        supervisor.send(("failed", f"nginx cannot be started: {reason}"))
        return 1
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        """Runs in the new process: resets signal handlers, and has nginx end with this process."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if sys.platform == "linux":
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        supervisor.send(("started", os.getpid()))  # the supervisor must know the id before nginx can outlive a kill

    nginx = subprocess.Popen(
        command,
        pass_fds=[listener.fileno()],
        # nginx inherits the sockets that this variable lists and its configuration listens on.
        env={"NGINX": f"{listener.fileno()};", "PATH": os.environ.get("PATH", "")},
        process_group=0,
        preexec_fn=before_exec,  # noqa: PLW1509  # no other thread runs yet
    )
    threading.Thread(target=_follow_supervisor, args=(nginx, supervisor), daemon=True).start()
    code = nginx.wait()
    _kill_group(nginx.pid)  # the workers outlive a master that was killed
    return 1 if code else 0


def _config_error(command: list[str]) -> str | None:
    """Returns nginx's message about a faulty configuration, or None."""
    tested = subprocess.run([*command, "-t", "-q"], capture_output=True, text=True, check=False, timeout=30)
    return None if tested.returncode == 0 else (tested.stderr.strip() or "no reason given").replace("\n", "; ")


def _follow_supervisor(nginx: subprocess.Popen[bytes], supervisor: Connection) -> None:
    try:
        while supervisor.recv() != "quit":
            pass
        nginx.send_signal(signal.SIGQUIT)
        supervisor.recv()
    except (EOFError, OSError):
        _kill_group(nginx.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
