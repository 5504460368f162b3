"""The engine on one thread with a virtual clock. Traffic, faults and the order of events come from a seed."""
