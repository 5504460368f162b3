"""The engine on one thread with a virtual clock: traffic, faults and every order of events come from a seed."""
