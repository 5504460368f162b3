"""Turns: a session's state leased, recorded, checked in; sessions imported and exported."""
