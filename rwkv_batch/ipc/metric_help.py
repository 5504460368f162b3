"""Help texts of the gauges that /metrics makes from /status."""

from __future__ import annotations

HELP = {
    # Rows and prompts
    "running_rows": "Rows that have a running slot.",
    "waiting_rows": "Rows that wait for a running slot.",
    "waiting_interactive_rows": "Rows of interactive requests that wait for a running slot.",
    "paused_rows": "Preempted rows. They keep their state slots.",
    "draining": "Whether the engine refuses new jobs: 1 or 0.",
    "queued_prompt_tokens": "Prompt tokens that waiting and running rows have left to compute.",
    "prompt_backlog_s": "Estimated seconds to compute the queued prompt tokens.",
    # Throughput
    "steps": "Engine steps since the start.",
    "busy_s": "Seconds since the start in which at least one step ran.",
    "generated_tokens": "Tokens generated since the start.",
    "computed_tokens": "Tokens that the model computed since the start, prompts included.",
    "generated_tokens_per_s": "Generated tokens per second, mean of the last ten seconds.",
    "computed_tokens_per_s": "Computed tokens per second, prompts included, mean of the last ten seconds.",
    "drawn_tokens": "Older name of rwkv_generated_tokens.",
    "read_tokens": "Older name of rwkv_computed_tokens.",
    "drawn_tokens_per_s": "Older name of rwkv_generated_tokens_per_s.",
    "read_tokens_per_s": "Older name of rwkv_computed_tokens_per_s.",
    # Speculative decoding
    "speculation_ngram_drafted": "Tokens drafted from the row's own text since the start.",
    "speculation_ngram_accepted": "Those of them that sampling chose.",
    "speculation_prediction_drafted": "Tokens drafted from predictions since the start.",
    "speculation_prediction_accepted": "Those of them that sampling chose.",
    "speculation_model_drafted": "Tokens drafted by the draft model since the start.",
    "speculation_model_accepted": "Those of them that sampling chose.",
    # Model
    "parameters": "Parameters of the model.",
    "weight_bytes": "Bytes of the weights on all devices.",
    "pipeline_micro_batches": "Micro-batches that decoding rows are split into.",
    "pipeline_steps_in_flight": "Maximum steps that are launched but not yet read by the host.",
    "max_running": "Maximum running rows.",
    "free_slots": "State slots on the device that are free.",
    "state_bytes": "Bytes of one state on the device.",
    # State pool
    "pool_sessions": "Sessions that exist, in all tiers.",
    "pool_slots_total": "State slots on the device.",
    "pool_slots_free": "State slots on the device that are free.",
    "pool_l1_sessions": "Sessions whose state is on the device.",
    "pool_l1_limit": "Maximum sessions whose state is on the device.",
    "pool_l1_bytes": "Bytes of the sessions' states on the device.",
    "pool_l2_sessions": "Sessions whose state is in host memory.",
    "pool_l2_limit": "Maximum sessions whose state is in host memory.",
    "pool_l2_bytes": "Bytes of the sessions' states in host memory.",
    "pool_session_ttl_s": "Seconds without a turn after which a session is deleted.",
    "pool_waiting_leases": "Turns that wait for their session.",
    "pool_quarantined_count": "Sessions that cannot be used because their data is damaged.",
    "pool_tuned_states_loaded": "Tuned states that requests may name.",
    "pool_tuned_states_limit": "Maximum tuned states that requests may name.",
    "pool_tuned_states_in_slots": "Tuned states that are on the device.",
    "pool_adapters_loaded": "Adapters that requests may name.",
    "pool_adapters_limit": "Maximum adapters that requests may name.",
    "pool_adapters_rows": "Rows that use an adapter.",
    # Prefix cache
    "pool_prefix_cache_enabled": "Whether the prefix cache is on: 1 or 0.",
    "pool_prefix_cache_l1": "Cached prefixes on the device.",
    "pool_prefix_cache_l2": "Cached prefixes in host memory.",
    "pool_prefix_cache_history_bytes": "Bytes of recent prompts, in which shared prefixes are found.",
    "pool_prefix_cache_hits": "Prompts that began with a cached prefix, since the start.",
    "pool_prefix_cache_misses": "Prompts without a cached prefix, since the start.",
    "pool_prefix_cache_saved_tokens": "Prompt tokens not computed because of cached prefixes, since the start.",
    "pool_prefix_cache_stored": "Prefixes added to the cache since the start.",
    "pool_prefix_cache_dropped": "Prefixes removed from the cache since the start.",
    # Movement between tiers
    "pool_counters_demotions": "Sessions' states moved from the device to host memory, since the start.",
    "pool_counters_promotions": "Sessions' states moved from host memory to the device, since the start.",
    "pool_counters_loads": "Sessions' states loaded from the database, since the start.",
    "pool_counters_lost": "Sessions' states dropped that the database cannot restore, since the start.",
    "pool_counters_left_to_log": "States dropped while the disk was behind. The token log rebuilds them.",
    "pool_counters_stale_turns": "Turns refused because another engine had taken the session, since the start.",
    "pool_counters_expired": "Sessions deleted after --session-ttl without a turn, since the start.",
    "pool_counters_evicted": "Sessions deleted because the database exceeded --state-db-max-gb, since the start.",
    "pool_counters_bytes_to_host": "Bytes of states copied from the device to host memory, since the start.",
    "pool_counters_bytes_to_device": "Bytes of states copied from host memory to the device, since the start.",
    "pool_counters_bytes_from_disk": "Bytes of states read from the database, since the start.",
    # Database
    "pool_database_queued_turns": "Turns and other small writes that wait for the database.",
    "pool_database_queued_states": "States that wait to be written to the database.",
    "pool_database_commits": "Transactions committed since the start.",
    "pool_database_turns": "Turns written since the start.",
    "pool_database_states": "States written since the start.",
    "pool_database_state_bytes": "Bytes of states written since the start.",
    "pool_database_failures": "Failed writes since the start.",
    "pool_database_used_bytes": "Bytes of the database, without free pages.",
    "pool_database_object_bytes": "Bytes of the states in the checkpoint store.",
    "pool_database_checkpoint_store_puts": "Objects written to the checkpoint store since the start.",
    "pool_database_checkpoint_store_put_bytes": "Bytes written to the checkpoint store since the start.",
    "pool_database_checkpoint_store_gets": "Objects read from the checkpoint store since the start.",
    "pool_database_checkpoint_store_deletes": "Objects deleted from the checkpoint store since the start.",
    "pool_database_checkpoint_store_orphans": "Deleted objects that no database row named, since the start.",
    "pool_database_checkpoint_store_missing": "Objects of database rows found missing or damaged, since the start.",
}
"""By the gauge's name without `rwkv_`."""
DEVICE_HELP = {
    "memory_used_bytes": "Bytes of the device's memory in use. CPU: resident bytes of the engine's process.",
    "memory_total_bytes": "Bytes of the device's memory.",
    "power_watts": "Watts that the device uses now.",
}


def help_of(name: str) -> str:
    """Return the meaning of a gauge, with its unit."""
    if name.startswith("work_mib_"):
        return "MiB of a GPU's memory without weights and slots: graphs, samplers, activations."
    return HELP.get(name, f"Value of {name} in /status.")
