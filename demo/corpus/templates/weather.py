"""The weather: of a place, of a day, of a season."""

from __future__ import annotations

from random import Random

from demo.corpus import lexicon
from demo.corpus.nominal import pick, term
from demo.corpus.templates.said import Said

SEASONS = (("spring", "春天"), ("summer", "夏天"), ("autumn", "秋天"), ("winter", "冬天"))


def weather_clause(rng: Random) -> tuple[str, str]:
    """The weather of a day, without capital or mark."""
    word = pick(rng, lexicon.adjectives()["weather"])
    time, time_zh = pick(rng, (("today", "今天"), ("tomorrow", "明天"), ("yesterday", "昨天")))
    be = {"today": "is", "tomorrow": "will be", "yesterday": "was"}[time]
    if rng.random() < 0.4:
        return f"the weather {be} {word.en} {time}", f"{time_zh}天气{word.zh}"
    city = pick(rng, lexicon.terms("places")["city"] + lexicon.terms("places")["country"])
    draw = rng.random()
    if draw < 0.5:
        return f"the weather in {city.en} {be} {word.en} {time}", f"{time_zh}{city.zh}天气{word.zh}"
    kind, kind_zh = pick(rng, (("rain", "下雨"), ("snow", "下雪")))
    verb = {"today": f"is {kind}ing", "tomorrow": f"will {kind}", "yesterday": f"{kind}ed"}[time]
    mark = {"today": "正在", "tomorrow": "会", "yesterday": ""}[time]
    ending = "了" if time == "yesterday" else ""
    return f"it {verb} in {city.en} {time}", f"{time_zh}{city.zh}{mark}{kind_zh}{ending}"


def weather(rng: Random) -> Said:
    draw = rng.random()
    city = term(rng, "places", "city")
    if draw < 0.6:
        en, zh = weather_clause(rng)
        return f"{en}.", f"{zh}。"
    if draw < 0.8:
        degrees = rng.randint(21, 45)
        time, time_zh = pick(rng, (("today", "今天"), ("tomorrow", "明天")))
        be = "is" if time == "today" else "will be"
        return f"it {be} {degrees} degrees in {city.en} {time}.", f"{time_zh}{city.zh}{degrees}度。"
    season, season_zh = pick(rng, SEASONS)
    word = pick(rng, lexicon.adjectives()["weather"])
    return f"the weather in {city.en} is {word.en} in {season}.", f"{city.zh}{season_zh}天气{word.zh}。"
