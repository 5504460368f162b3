"""Several GPUs as stages of a pipeline: what each step takes where, and schedules in virtual time."""
