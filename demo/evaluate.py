"""The figures of a model: exact translations of held-out sentences, recall in held-out sessions, calls
of tools and JSON of held-out facts, bits per token."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from demo.corpus import chat, structured, tools, translation
from demo.files import MODEL, ensure_model
from demo.talker import Talker


@dataclass(slots=True)
class Score:
    """A share of right answers and the first wrong ones."""

    right: int = 0
    asked: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Right answers among all."""
        return self.right / max(self.asked, 1)

    def count(self, prompt: str, wanted: str, got: str, right: bool) -> None:
        """Take one answer in."""
        self.asked += 1
        self.right += right
        if not right and len(self.wrong) < 40:
            self.wrong.append((prompt, wanted, got))


def held_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """English and Chinese of held-out sentences, each once."""
    rng = Random(f"held/{seed}")
    found: dict[str, str] = {}
    while len(found) < count:
        pair = translation.fresh_pair(rng, held=True)
        found.setdefault(pair.en, pair.zh)
    return list(found.items())


def translation_score(talker: Talker, pairs: list[tuple[str, str]], *, english: bool, size: int = 512) -> Score:
    """Exact matches of held-out sentences in one direction."""
    score = Score()
    for start in range(0, len(pairs), size):
        some = [pair if english else pair[::-1] for pair in pairs[start : start + size]]
        answers = talker.complete([translation.prompt(source, english=english) for source, _ in some], 160)
        for (source, target), answer in zip(some, answers, strict=True):
            score.count(source, target, answer.strip(), answer.strip() == target)
    return score


def recall_score(talker: Talker, count: int, seed: int, *, turns: tuple[int, int] = (3, 8), size: int = 256) -> Score:
    """Facts given back in held-out sessions, with small talk between."""
    rng = Random(f"sessions/{seed}")
    scripts = [chat.session(rng, held=True, turns=turns) for _ in range(count)]
    prompts = [[prompt for prompt, _ in chat.prompts(rng, script, plain=rng.random() < 0.5)] for script in scripts]
    score = Score()
    for start in range(0, count, size):
        answers = talker.converse(prompts[start : start + size], 96)
        for script, given in zip(scripts[start : start + size], answers, strict=True):
            for turn, answer in zip(script, given, strict=True):
                if turn.recall:
                    said = answer.rpartition("</think>")[2].lstrip(">").strip()
                    score.count(turn.user, turn.answer, said, said == turn.answer)
    return score


def tool_score(talker: Talker, count: int, seed: int, *, size: int = 512) -> Score:
    """Exact matches of held-out calls, each asked with one to four tools listed."""
    rng = Random(f"tools/{seed}")
    asked: list[tuple[str, str]] = []
    while len(asked) < count:
        listing, wish = tools.held_wish(rng)
        asked.append(
            (f"{tools.system(listing)}\n\nUser: {wish.asked}\n\nAssistant: {tools.FENCE}", tools.fenced(wish.call))
        )
    return _exact(talker, asked, size)


def json_score(talker: Talker, count: int, seed: int, *, size: int = 512) -> Score:
    """Exact matches of the objects made of held-out facts."""
    rng = Random(f"structured/{seed}")
    asked = [structured.extraction(rng, held=True) for _ in range(count)]
    return _exact(talker, [(f"User: {request}\n\nAssistant:", answer) for request, answer in asked], size)


def _exact(talker: Talker, asked: list[tuple[str, str]], size: int) -> Score:
    score = Score()
    for start in range(0, len(asked), size):
        some = asked[start : start + size]
        answers = talker.complete([prompt for prompt, _ in some], 160)
        for (prompt, wanted), answer in zip(some, answers, strict=True):
            score.count(prompt, wanted.strip(), answer.strip(), answer.strip() == wanted.strip())
    return score


def report(talker: Talker, *, sentences: int = 1000, sessions: int = 300, seed: int = 1) -> dict[str, object]:
    """All figures, with the first wrong answers."""
    pairs = held_pairs(sentences, seed)
    scores = {
        "english to chinese": translation_score(talker, pairs, english=True),
        "chinese to english": translation_score(talker, pairs, english=False),
        "recall": recall_score(talker, sessions, seed),
        "tool calls": tool_score(talker, sentences, seed),
        "json": json_score(talker, sentences, seed),
    }
    figures: dict[str, object] = {name: round(score.share, 4) for name, score in scores.items()}
    figures["wrong"] = {name: score.wrong for name, score in scores.items()}
    figures["asked"] = {name: score.asked for name, score in scores.items()}
    return figures


def bits_per_token(path: Path, count: int, seed: int) -> float:
    """Bits per token of the translations of held-out sentences, both ways, by the training model in fp32."""
    import torch

    from demo import vocabulary
    from demo.export import load_compact

    model, compact = load_compact(path)
    bits, tokens = 0.0, 0
    for en, zh in held_pairs(count, seed):
        for source, target, english in ((en, zh, True), (zh, en, False)):
            prompt = vocabulary.encode(translation.prompt(source, english=english))
            answer = [*vocabulary.encode(f" {target}"), 261]
            rows = torch.from_numpy(compact.of_id[prompt + answer])
            padded = torch.nn.functional.pad(rows[:-1], (0, -(len(rows) - 1) % 16))[None]
            begins = torch.zeros_like(padded, dtype=torch.bool)
            begins[:, 0] = True
            with torch.no_grad():
                logits = model(padded, begins)[0, len(prompt) - 1 : len(rows) - 1]
            logits[:, compact.unused] += math.log(compact.multiplicity)
            nats = torch.nn.functional.cross_entropy(logits, rows[len(prompt) :], reduction="sum")
            bits, tokens = bits + float(nats) / math.log(2), tokens + len(answer)
    return bits / tokens


def main() -> None:
    """Evaluate the shipped model through the engine, or with the training model's own decoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="a compact file")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--sessions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--oracle", action="store_true", help="the training model's decoder instead of the engine")
    parser.add_argument("--device", default="cpu", help="of the engine several, with commas between: 0,1,2,3")
    parser.add_argument(
        "--dtype", default="auto", help="of the engine: auto (fp16 on CUDA), fp32, bf16, fp16, fp8, int8, int4"
    )
    parser.add_argument("--wkv-state", default="fp32", help="of the engine: fp32, fp16 or int8")
    args = parser.parse_args()
    if args.oracle:
        from demo.export import load_compact
        from demo.talker import TorchTalker

        model, compact = load_compact(args.model)
        figures = report(
            TorchTalker(model.to(args.device), compact),
            sentences=args.sentences,
            sessions=args.sessions,
            seed=args.seed,
        )
    else:
        from demo.engine_talker import engine_talker

        model_path = ensure_model(source=args.model)
        with engine_talker(model_path, device=args.device, dtype=args.dtype, wkv_state=args.wkv_state) as talker:
            figures = report(talker, sentences=args.sentences, sessions=args.sessions, seed=args.seed)
    figures["bits per token"] = round(bits_per_token(args.model, min(args.sentences, 100), args.seed), 5)
    print(json.dumps(figures, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
