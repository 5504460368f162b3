"""Times: of a day, of a year and as long as they last, and those that suit a tense."""

from __future__ import annotations

from random import Random

from demo.corpus.morphology import chinese, spelled
from demo.corpus.nominal import pick

WEEKDAYS = tuple(zip("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(), "一二三四五六日", strict=True))
MONTHS = "January February March April May June July August September October November December".split()
SPANS = (("day", "天"), ("week", "个星期"), ("month", "个月"), ("year", "年"), ("hour", "个小时"), ("minute", "分钟"))
PAST = (
    ("yesterday", "昨天"),
    ("last night", "昨晚"),
    ("last week", "上周"),
    ("last month", "上个月"),
    ("last year", "去年"),
    ("this morning", "今天早上"),
    ("yesterday morning", "昨天早上"),
    ("yesterday afternoon", "昨天下午"),
    ("the day before yesterday", "前天"),
    ("just now", "刚才"),
    ("last weekend", "上个周末"),
    ("last summer", "去年夏天"),
    ("last winter", "去年冬天"),
    ("yesterday evening", "昨天傍晚"),
)
FUTURE = (
    ("tomorrow", "明天"),
    ("tonight", "今晚"),
    ("next week", "下周"),
    ("next month", "下个月"),
    ("next year", "明年"),
    ("tomorrow morning", "明天早上"),
    ("tomorrow afternoon", "明天下午"),
    ("the day after tomorrow", "后天"),
    ("soon", "很快"),
    ("next weekend", "下个周末"),
    ("next summer", "明年夏天"),
    ("later", "以后"),
    ("tomorrow evening", "明天晚上"),
)
HABIT = (
    ("every day", "每天"),
    ("every morning", "每天早上"),
    ("every evening", "每天晚上"),
    ("every week", "每周"),
    ("every month", "每个月"),
    ("every year", "每年"),
    ("on weekends", "周末"),
    ("every weekend", "每个周末"),
    ("every afternoon", "每天下午"),
    ("twice a week", "每周两次"),
    ("once a month", "每月一次"),
    ("in summer", "夏天"),
    ("in winter", "冬天"),
)
DAYPARTS = (("in the morning", "早上"), ("in the afternoon", "下午"), ("in the evening", "晚上"))


def clock(rng: Random) -> tuple[str, str]:
    """A time of day: `half past three` 三点半."""
    hour, draw = rng.randint(1, 12), rng.random()
    if draw < 0.35:
        return f"{spelled(hour)} o'clock", f"{chinese(hour)}点"
    if draw < 0.6:
        return f"half past {spelled(hour)}", f"{chinese(hour)}点半"
    if draw < 0.72:
        return f"a quarter past {spelled(hour)}", f"{chinese(hour)}点一刻"
    if draw < 0.82:
        return f"a quarter to {spelled(hour)}", f"差一刻{chinese(hour)}点"
    minute = rng.randint(1, 59)
    return f"{hour}:{minute:02d}", f"{hour}点{minute:02d}分"


def date(rng: Random) -> tuple[str, str]:
    """A day of the year: `May 3` 5月3日."""
    month = rng.randint(1, 12)
    day = rng.randint(1, 28)
    return f"{MONTHS[month - 1]} {day}", f"{month}月{day}日"


def span(rng: Random) -> tuple[str, str]:
    """A length of time: `two weeks` 两个星期."""
    number = rng.randint(2, 20) if rng.random() < 0.9 else rng.randint(21, 90)
    en, zh = pick(rng, SPANS)
    return f"{spelled(number)} {en}s", f"{chinese(number)}{zh}"


def _at_clock(rng: Random) -> tuple[str, str]:
    en, zh = clock(rng)
    if rng.random() < 0.4 and ":" not in en and not zh.startswith("差"):
        part, part_zh = pick(rng, DAYPARTS)
        return f"at {en} {part}", f"{part_zh}{zh}"
    return f"at {en}", zh


def when(rng: Random, tense: str) -> tuple[str, str]:
    """A time that suits a tense: English for the end, Chinese for after the subject."""
    draw = rng.random()
    if tense == "habit":
        if draw < 0.6:
            return pick(rng, HABIT)
        if draw < 0.8:
            day, zh = pick(rng, WEEKDAYS)
            return f"every {day}", f"每个星期{zh}"
        en, zh = _at_clock(rng)
        return f"every day {en}", f"每天{zh}"
    if draw < 0.55:
        return pick(rng, PAST if tense == "past" else FUTURE)
    if draw < 0.7:
        day, zh = pick(rng, WEEKDAYS)
        word, mark = ("last", "上") if tense == "past" else ("next", "下")
        return f"{word} {day}", f"{mark}周{zh}"
    if draw < 0.8:
        en, zh = span(rng)
        return (f"{en} ago", f"{zh}前") if tense == "past" else (f"in {en}", f"{zh}后")
    if draw < 0.88:
        en, zh = date(rng)
        return f"on {en}", zh
    if draw < 0.94 and tense == "past":
        year = rng.randint(1950, 2024)
        return f"in {year}", f"{year}年"
    day, day_zh = ("yesterday", "昨天") if tense == "past" else ("tomorrow", "明天")
    en, zh = _at_clock(rng)
    return f"{day} {en}", f"{day_zh}{zh}"
