"""Runs lm-evaluation-harness against a running service, tasks of every kind (docs/generation.md).

    pip install "lm_eval[api]"
    python examples/evaluate.py --url http://127.0.0.1:8000 --tasks arc_easy [--limit 100] [flags of lm_eval]

The service tokenises, so no tokenizer is downloaded. OPENAI_API_KEY holds the password.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys


def command(lm_eval: str, given: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return the command: batches of 16 prompts, eight requests at a time."""
    model = f"model={given.model},base_url={given.url}/openai/v1/completions,num_concurrent=8,max_length=4096"
    if password := os.environ.get("OPENAI_API_KEY"):
        model += f",auth_token={password}"  # for the tokenizer's routes
    flags = ["run", "--model", "local-completions", "--model_args", model, "--tasks", given.tasks, "--batch_size", "16"]
    return [lm_eval, *flags, *rest]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="rwkv7", help="the service's name for it")
    parser.add_argument("--tasks", default="lambada_openai,arc_easy")
    given, rest = parser.parse_known_args()
    lm_eval = shutil.which("lm_eval")
    if lm_eval is None:
        sys.stderr.write('error: there is no lm_eval on the PATH; pip install "lm_eval[api]"\n')
        return 1
    return subprocess.run(command(lm_eval, given, rest), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
