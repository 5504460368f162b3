"""The third tier: SQLite, its threads and its rows. The only place with sqlite3."""
