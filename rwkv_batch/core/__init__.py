"""Decides: who runs, what each row reads next, what its tokens mean. No torch."""
