"""L3: the session database, its threads and rows, and states as objects. The only place with sqlite3."""
