"""The HTTP status of each kind of error."""

from __future__ import annotations

from rwkv_batch.errors import ErrorKind

HTTP_STATUS = {
    ErrorKind.NOT_JSON: 400,
    ErrorKind.INVALID_FIELD: 422,
    ErrorKind.UNAUTHORIZED: 401,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.METHOD_NOT_ALLOWED: 405,
    ErrorKind.MODEL_NOT_FOUND: 404,
    ErrorKind.BODY_TOO_LARGE: 413,
    ErrorKind.SESSION_NOT_FOUND: 404,
    ErrorKind.SESSION_BUSY: 409,
    ErrorKind.SESSION_UNUSABLE: 409,
    ErrorKind.STATE_NOT_FOUND: 404,
    ErrorKind.ADAPTER_NOT_FOUND: 404,
    ErrorKind.NAME_TAKEN: 409,
    ErrorKind.OVERLOADED: 429,
    ErrorKind.DRAINING: 503,
    ErrorKind.ENGINE_LOST: 503,
    ErrorKind.TIMEOUT: 504,
    ErrorKind.CANCELLED: 409,
    ErrorKind.INTERNAL: 500,
}
