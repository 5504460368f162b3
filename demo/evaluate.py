"""Evaluates a demo model on held-out text: translations, recall, tool calls and JSON answers."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from demo.corpus import chat, structured, tools, translation
from demo.engine_client import EngineClient, open_engine
from demo.files import MODEL, ensure_model


@dataclass(slots=True)
class Score:
    """Keeps the first wrong answers."""

    right: int = 0
    asked: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.right / max(self.asked, 1)

    def count(self, prompt: str, expected: str, actual: str, right: bool) -> None:
        self.asked += 1
        self.right += right
        if not right and len(self.wrong) < 40:
            self.wrong.append((prompt, expected, actual))


def held_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return `count` different held-out sentences in English and Chinese."""
    rng = Random(f"held/{seed}")
    found: dict[str, str] = {}
    while len(found) < count:
        pair = translation.fresh_pair(rng, held=True)
        found.setdefault(pair.en, pair.zh)
    return list(found.items())


def _exact(client: EngineClient, asked: list[tuple[str, str]], size: int = 512) -> Score:
    """Score exact matches of (prompt, answer) pairs."""
    score = Score()
    for start in range(0, len(asked), size):
        some = asked[start : start + size]
        for (prompt, expected), actual in zip(some, client.complete([prompt for prompt, _ in some], 160), strict=True):
            score.count(prompt, expected.strip(), actual.strip(), actual.strip() == expected.strip())
    return score


def translation_score(client: EngineClient, pairs: list[tuple[str, str]], *, english: bool) -> Score:
    """Score exact matches of held-out sentences in one direction."""
    both = [pair if english else pair[::-1] for pair in pairs]
    return _exact(client, [(translation.prompt(source, english=english), target) for source, target in both])


def recall_score(client: EngineClient, count: int, seed: int, *, size: int = 256) -> Score:
    """Score facts that held-out sessions ask for. Three to eight rounds of small talk come before."""
    rng = Random(f"sessions/{seed}")
    scripts = [chat.session(rng, held=True, turns=(3, 8)) for _ in range(count)]
    prompts = [[prompt for prompt, _ in chat.prompts(rng, script, plain=rng.random() < 0.5)] for script in scripts]
    score = Score()
    for start in range(0, count, size):
        answers = client.converse(prompts[start : start + size], 96)
        for script, given in zip(scripts[start : start + size], answers, strict=True):
            for turn, answer in zip(script, given, strict=True):
                if turn.recall:
                    said = answer.rpartition("</think>")[2].lstrip(">").strip()
                    score.count(turn.user, turn.answer, said, said == turn.answer)
    return score


def tool_score(client: EngineClient, count: int, seed: int) -> Score:
    """Score exact matches of held-out calls, with one to four tools listed."""
    rng = Random(f"tools/{seed}")
    requests = [tools.request(rng, held=True) for _ in range(count)]
    prompts = [f"{tools.system(listed)}\n\nUser: {one.asked}\n\nAssistant: {tools.FENCE}" for listed, one in requests]
    return _exact(
        client, [(prompt, tools.fenced(one.call)) for prompt, (_, one) in zip(prompts, requests, strict=True)]
    )


def json_score(client: EngineClient, count: int, seed: int) -> Score:
    """Score exact matches of JSON objects of held-out facts."""
    rng = Random(f"structured/{seed}")
    asked = [structured.extraction(rng, held=True) for _ in range(count)]
    return _exact(client, [(f"User: {request}\n\nAssistant:", answer) for request, answer in asked])


def report(client: EngineClient, *, sentences: int = 1000, sessions: int = 300, seed: int = 1) -> dict[str, object]:
    """Return all figures and the first wrong answers."""
    pairs = held_pairs(sentences, seed)
    scores = {
        "english to chinese": translation_score(client, pairs, english=True),
        "chinese to english": translation_score(client, pairs, english=False),
        "recall": recall_score(client, sessions, seed),
        "tool calls": tool_score(client, sentences, seed),
        "json": json_score(client, sentences, seed),
    }
    figures: dict[str, object] = {name: round(score.share, 4) for name, score in scores.items()}
    figures["wrong"] = {name: score.wrong for name, score in scores.items()}
    figures["asked"] = {name: score.asked for name, score in scores.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a compact file")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="one device or several: 0,1,2,3")
    parser.add_argument("--dtype", default="auto", help="auto (fp16 on CUDA), fp32, bf16, fp16, fp8, int8 or int4")
    parser.add_argument("--wkv-state", default="fp32", help="fp32, fp16 or int8")
    args = parser.parse_args()
    model_path = ensure_model(source=args.model)
    with open_engine(model_path, device=args.device, dtype=args.dtype, wkv_state=args.wkv_state) as client:
        figures = report(client, sentences=args.sentences, sessions=args.sessions, seed=args.seed)
    print(json.dumps(figures, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
