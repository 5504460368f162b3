"""The tiers above the disk: slots, host memory, cached prompt prefixes."""
