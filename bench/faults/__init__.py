"""The real service killed, abused and used for long: turns that must not be lost, silence, growth."""
