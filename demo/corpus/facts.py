"""What a user may tell about themselves, and how it is told, asked for and given back, in English and Chinese."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo.corpus import lexicon
from demo.corpus.nominal import invented_name, pick
from demo.corpus.times import MONTHS, WEEKDAYS

Drawing = Callable[[Random], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fact: how values are drawn and the sentences around them, English and Chinese, `{}` for the value."""

    name: str
    draw: Drawing
    told: tuple[str, ...]
    noted: tuple[str, ...]
    asked: tuple[str, ...]
    given: str
    unknown: str
    told_zh: tuple[str, ...]
    noted_zh: tuple[str, ...]
    asked_zh: tuple[str, ...]
    given_zh: str
    unknown_zh: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A kind with its value in both languages."""

    kind: Kind
    en: str
    zh: str

    def value(self, chinese: bool) -> str:
        """The value in the language of the talk."""
        return self.zh if chinese else self.en


def _name(rng: Random) -> tuple[str, str]:
    if rng.random() < 0.35:
        word = invented_name(rng)
        return word, word
    people = lexicon.terms("people")
    term = pick(rng, people["name-f"] + people["name-m"])
    return term.en, term.zh


def _of(file: str, *kinds: str) -> Drawing:
    def draw(rng: Random) -> tuple[str, str]:
        term = pick(rng, lexicon.terms(file)[pick(rng, kinds)])
        return term.en, term.zh

    return draw


def _plural_of(*kinds: str) -> Drawing:
    def draw(rng: Random) -> tuple[str, str]:
        noun = pick(rng, lexicon.nouns()[pick(rng, kinds)])
        return noun.plural, noun.zh

    return draw


def _number(rng: Random) -> tuple[str, str]:
    number = str(rng.randint(2, 99) if rng.random() < 0.4 else rng.randint(100, 99999))
    return number, number


def _age(rng: Random) -> tuple[str, str]:
    age = str(rng.randint(5, 99))
    return age, age


def _job(rng: Random) -> tuple[str, str]:
    noun = pick(rng, lexicon.nouns("people")["job"])
    return noun.en, noun.zh


def _color(rng: Random) -> tuple[str, str]:
    word = pick(rng, lexicon.adjectives()["color"][:10])
    return word.en, word.zh


def _weekday(rng: Random) -> tuple[str, str]:
    day, zh = pick(rng, WEEKDAYS)
    return day, f"星期{zh}"


def _birthday(rng: Random) -> tuple[str, str]:
    month, day = rng.randint(1, 12), rng.randint(1, 28)
    return f"{MONTHS[month - 1]} {day}", f"{month}月{day}日"


def _season(rng: Random) -> tuple[str, str]:
    return pick(rng, (("spring", "春天"), ("summer", "夏天"), ("autumn", "秋天"), ("winter", "冬天")))


def _thing(rng: Random) -> tuple[str, str]:
    noun = pick(rng, lexicon.nouns()[pick(rng, ("fruit", "animal", "plant", "tool", "vehicle"))])
    return noun.en, noun.zh


def _favorite(thing: str, thing_zh: str, draw: Drawing) -> Kind:
    be = "are" if thing.endswith("s") else "is"
    return Kind(
        f"favorite {thing}", draw,
        (f"My favorite {thing} {be} {{}}.", f"My favourite {thing} {be} {{}}.", f"I like {{}} best. It is my favorite {thing}.", f"Remember that my favorite {thing} {be} {{}}."),
        (f"Got it, your favorite {thing} {be} {{}}.", f"I will remember that your favorite {thing} {be} {{}}."),
        (f"What is my favorite {thing}?", f"What's my favourite {thing}?", f"Do you remember my favorite {thing}?", f"Tell me my favorite {thing}.", f"Which {thing} do I like best?"),
        f"Your favorite {thing} {be} {{}}.", f"You have not told me your favorite {thing} yet.",
        (f"我最喜欢的{thing_zh}是{{}}。", f"记住，我最喜欢的{thing_zh}是{{}}。", f"我最喜爱的{thing_zh}是{{}}"),
        (f"好的，你最喜欢的{thing_zh}是{{}}。",),
        (f"我最喜欢的{thing_zh}是什么？", f"你记得我最喜欢的{thing_zh}吗？", f"我最喜欢什么{thing_zh}？"),
        f"你最喜欢的{thing_zh}是{{}}。", f"你还没有告诉我你最喜欢的{thing_zh}。",
    )  # fmt: skip


def _owned(thing: str, thing_zh: str, draw: Drawing) -> Kind:
    return Kind(
        thing, draw,
        (f"My {thing} is {{}}.", f"Please remember that my {thing} is {{}}.", f"my {thing} is {{}}", f"Remember: my {thing} is {{}}.", f"Remember that my {thing} is {{}}.", f"{{}} is my {thing}."),
        (f"Got it, your {thing} is {{}}.", f"I will remember that your {thing} is {{}}."),
        (f"What is my {thing}?", f"What's my {thing}?", f"Do you remember my {thing}?", f"Tell me my {thing}.", f"what is my {thing}"),
        f"Your {thing} is {{}}.", f"You have not told me your {thing} yet.",
        (f"我的{thing_zh}是{{}}。", f"请记住，我的{thing_zh}是{{}}。"),
        (f"好的，你的{thing_zh}是{{}}。", f"我记住了，你的{thing_zh}是{{}}。"),
        (f"我的{thing_zh}是什么？", f"你记得我的{thing_zh}吗？", f"请告诉我我的{thing_zh}。"),
        f"你的{thing_zh}是{{}}。", f"你还没有告诉我你的{thing_zh}。",
    )  # fmt: skip


NAME = Kind(
    "name", _name,
    ("My name is {}.", "I am {}.", "I'm {}.", "Hello, my name is {}.", "Hi, I'm {}.", "Call me {}.", "You can call me {}.", "my name is {}", "Hello! My name is {}!", "Hi! I am {}."),
    ("Nice to meet you, {}!", "Hello, {}! Nice to meet you.", "Hello, {}! How can I help you?"),
    ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Tell me my name.", "what is my name", "Do you know my name?", "Can you tell me my name?", "Please say my name."),
    "Your name is {}.", "You have not told me your name yet.",
    ("我叫{}。", "我的名字是{}。", "你好，我叫{}。", "你好，我是{}。", "你可以叫我{}。", "我是{}"),
    ("很高兴认识你，{}！", "你好，{}！很高兴认识你。"),
    ("我叫什么名字？", "我叫什么？", "你记得我的名字吗？", "我是谁？", "你知道我叫什么名字吗？"),
    "你叫{}。", "你还没有告诉我你的名字。",
)  # fmt: skip
CITY = Kind(
    "city", _of("places", "city"),
    ("I live in {}.", "I live in the city of {}.", "My home is in {}.", "My city is {}.", "i live in {}", "I am living in {} now."),
    ("{} is a beautiful city.", "I have heard a lot about {}.", "Got it, you live in {}."),
    ("Where do I live?", "Which city do I live in?", "In which city do I live?", "Do you remember where I live?", "What city do I live in?", "where do i live?"),
    "You live in {}.", "You have not told me where you live yet.",
    ("我住在{}。", "我家在{}。", "我现在住在{}。"),
    ("{}是一座美丽的城市。", "好的，你住在{}。"),
    ("我住在哪里？", "我住在哪个城市？", "你记得我住在哪里吗？"),
    "你住在{}。", "你还没有告诉我你住在哪里。",
)  # fmt: skip
COUNTRY = Kind(
    "country", _of("places", "country"),
    ("I am from {}.", "I come from {}.", "I'm from {}."),
    ("I have heard a lot about {}.", "Got it, you are from {}."),
    ("Where am I from?", "Which country am I from?", "Where do I come from?"),
    "You are from {}.", "You have not told me where you are from yet.",
    ("我来自{}。",), ("好的，你来自{}。",), ("我来自哪里？", "我是从哪个国家来的？"), "你来自{}。", "你还没有告诉我你来自哪里。",
)  # fmt: skip
AGE = Kind(
    "age", _age,
    ("I am {} years old.", "I'm {} years old.", "My age is {}."), ("Got it, you are {} years old.",),
    ("How old am I?", "What is my age?", "Do you know how old I am?"), "You are {} years old.", "You have not told me your age yet.",
    ("我{}岁。", "我今年{}岁了。"), ("好的，你{}岁。",), ("我多大了？", "我几岁？", "我今年几岁？"), "你{}岁。", "你还没有告诉我你几岁。",
)  # fmt: skip
JOB = Kind(
    "job", _job,
    ("I work as a {}.", "My job is {}.", "My profession is {}."), ("Got it, your job is {}.", "{} is an interesting job."),
    ("What is my job?", "What do I do for a living?", "What's my profession?", "What do I work as?"), "Your job is {}.", "You have not told me your job yet.",
    ("我的职业是{}。", "我是一名{}。"), ("好的，你的职业是{}。",), ("我的职业是什么？", "我是做什么工作的？"), "你的职业是{}。", "你还没有告诉我你的职业。",
)  # fmt: skip
NUMBER = Kind(
    "number", _number,
    ("Remember the number {}.", "Please remember the number {}.", "My number is {}.", "Remember this number: {}.", "The number is {}.", "The secret number is {}.", "Remember: the number is {}.", "Remember: {}.", "Remember {}.", "Keep the number {} in mind."),
    ("I will remember the number {}.", "Got it, the number is {}."),
    ("What is the number?", "What was the number?", "Which number did I tell you?", "What number did I ask you to remember?", "Tell me the number.", "What is my number?", "What is the secret number?", "Do you remember the number?", "Which number should you remember?"),
    "The number is {}.", "You have not told me a number yet.",
    ("请记住数字{}。", "记住这个数字：{}。", "数字是{}。"), ("我会记住数字{}。",), ("数字是多少？", "我让你记住的数字是多少？", "你记得那个数字吗？", "我告诉你的数字是几？"), "数字是{}。", "你还没有告诉我数字。",
)  # fmt: skip
BIRTHDAY = Kind(
    "birthday", _birthday,
    ("My birthday is on {}.", "I was born on {}."), ("Got it, your birthday is on {}.",), ("When is my birthday?", "What day is my birthday?", "Do you remember my birthday?"),
    "Your birthday is on {}.", "You have not told me your birthday yet.",
    ("我的生日是{}。",), ("好的，你的生日是{}。",), ("我的生日是哪天？", "我的生日是什么时候？"), "你的生日是{}。", "你还没有告诉我你的生日。",
)  # fmt: skip
WORD = Kind(
    "word", _thing,
    ("Remember the word {}.", "The secret word is {}.", "Please remember this word: {}.", "The code word is {}."), ("I will remember the word {}.", "Got it, the word is {}."),
    ("What is the word?", "What was the secret word?", "Which word did I tell you?", "What is the code word?", "Tell me the word."), "The word is {}.", "You have not told me a word yet.",
    ("请记住这个词：{}。", "暗号是{}。"), ("我会记住这个词：{}。",), ("那个词是什么？", "暗号是什么？"), "那个词是{}。", "你还没有告诉我那个词。",
)  # fmt: skip
KINDS: tuple[Kind, ...] = (
    NAME, CITY, COUNTRY, AGE, JOB, NUMBER, BIRTHDAY, WORD,
    _favorite("color", "颜色", _color), _favorite("food", "食物", _of("mass", "dish")), _favorite("fruit", "水果", _plural_of("fruit")),
    _favorite("animal", "动物", _plural_of("animal")), _favorite("drink", "饮料", _of("mass", "drink")), _favorite("sport", "运动", _of("mass", "sport")),
    _favorite("subject", "科目", _of("mass", "subject")), _favorite("season", "季节", _season), _favorite("day", "日子", _weekday),
    _favorite("instrument", "乐器", _of("mass", "instrument")), _favorite("city", "城市", _of("places", "city")), _favorite("number", "数字", _number),
    _favorite("vegetable", "蔬菜", _plural_of("vegetable")), _favorite("flower", "花", _plural_of("plant")),
    _owned("dog's name", "狗的名字", _name), _owned("cat's name", "猫的名字", _name), _owned("sister's name", "姐姐的名字", _name),
    _owned("brother's name", "哥哥的名字", _name), _owned("friend's name", "朋友的名字", _name), _owned("teacher's name", "老师的名字", _name),
    _owned("room number", "房间号", _number), _owned("lucky number", "幸运数字", _number), _owned("password", "密码", _number),
    _owned("horse's name", "马的名字", _name), _owned("hometown", "家乡", _of("places", "city")), _owned("mother's name", "妈妈的名字", _name), _owned("phone number", "电话号码", _number),
    _owned("code", "代码", _number), _owned("PIN", "密码锁号码", _number), _owned("boss's name", "老板的名字", _name), _owned("ticket number", "票号", _number),
)  # fmt: skip


def fact(rng: Random, kind: Kind) -> Fact:
    """A fact of a kind with a drawn value."""
    return Fact(kind, *kind.draw(rng))
