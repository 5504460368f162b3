"""What the head of a Ray cluster asks of Redis, in memory: `python -m bench.acceptance.memory_redis PORT`.

Only for a head that dies and comes back; it knows no passwords, no expiry and no disk.
"""

from __future__ import annotations

import asyncio
import fnmatch
import sys


class MemoryRedis:
    """Hashes and counters by name; `answer` is the protocol."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, dict[bytes, bytes]] = {}
        self._counters: dict[bytes, int] = {}

    def answer(self, command: bytes, *arguments: bytes) -> bytes:
        """The reply to one command, as it goes on the wire."""
        match command.upper(), *arguments:
            case b"PING", *_:
                return b"+PONG\r\n"
            case b"INFO", *_:
                return _bulk(b"")  # no sentinel
            case b"INCRBY", key, count:
                self._counters[key] = self._counters.get(key, 0) + int(count)
                return _number(self._counters[key])
            case ((b"DEL" | b"UNLINK"), *keys):
                return _number(sum(self._hashes.pop(key, None) is not None for key in keys))
            case b"SCAN", *_:
                return _list([_bulk(b"0"), _list([_bulk(key) for key in self._hashes])])
            case name, key, *rest if name.startswith(b"H"):
                return self._of_hash(name, self._hashes.setdefault(key, {}), rest)
        return b"-ERR unknown command '%s'\r\n" % command

    @staticmethod
    def _of_hash(command: bytes, fields: dict[bytes, bytes], arguments: list[bytes]) -> bytes:
        match command:
            case b"HSET" | b"HMSET":
                pairs = dict(zip(arguments[::2], arguments[1::2], strict=True))
                new = len(pairs.keys() - fields.keys())
                fields.update(pairs)
                return _number(new)
            case b"HSETNX":
                is_new = arguments[0] not in fields
                fields.setdefault(arguments[0], arguments[1])
                return _number(is_new)
            case b"HGET":
                return _bulk(fields.get(arguments[0]))
            case b"HMGET":
                return _list([_bulk(fields.get(name)) for name in arguments])
            case b"HGETALL":
                return _list([_bulk(one) for pair in fields.items() for one in pair])
            case b"HDEL":
                return _number(sum(fields.pop(name, None) is not None for name in arguments))
            case b"HEXISTS":
                return _number(arguments[0] in fields)
            case b"HSCAN":
                pattern = arguments[arguments.index(b"MATCH") + 1] if b"MATCH" in arguments else b"*"
                found = [name for name in fields if fnmatch.fnmatchcase(name, pattern.replace(b"\\", b""))]
                return _list([_bulk(b"0"), _list([_bulk(one) for name in found for one in (name, fields[name])])])
        return b"-ERR unknown command '%s'\r\n" % command


def _bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


def _number(value: int) -> bytes:
    return b":%d\r\n" % value


def _list(values: list[bytes]) -> bytes:
    return b"*%d\r\n%s" % (len(values), b"".join(values))


async def _serve(kept: MemoryRedis, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readline():
            arguments = []
            for _ in range(int(head[1:])):
                length = int((await reader.readline())[1:])
                arguments.append((await reader.readexactly(length + 2))[:-2])
            writer.write(kept.answer(*arguments))
            await writer.drain()
    except (ValueError, asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main() -> None:
    """Serve until the process is ended."""
    kept = MemoryRedis()
    server = await asyncio.start_server(lambda *ends: _serve(kept, *ends), "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
