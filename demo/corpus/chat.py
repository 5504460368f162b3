"""Chats: facts told and asked back later, small talk between, a system round before, thoughts shown or not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from demo.corpus import arithmetic
from demo.corpus.document import Document, rounds
from demo.corpus.facts import KINDS, NAME, NUMBER, Fact, Kind, fact
from demo.corpus.nominal import noun_of, pick, term
from demo.corpus.split import held_out
from demo.corpus.translation import fresh_pair

SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.", "You are a polite and helpful assistant.", "Be brief.",
    "You are an assistant with a good memory.", "Answer in one sentence.", "You are a helpful AI.", "你是一个乐于助人的助手。", "请简短地回答。",
    "You are a small demo model.", "Be kind and clear.",
)  # fmt: skip
THINKS = ((" <think>\n</think>\n", ""), (" <think></think", ">\n"), (" <think>\n</think>", "\n"))
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hello.", "Hi!", "Hi", "hello", "Hey!", "Hi there!", "Good day!"), "Hello! How can I help you?"),
    (("How are you?", "How are you today?", "how are you", "How do you feel?", "Are you fine?"), "I am fine, thank you. How are you?"),
    (("I am fine.", "I'm fine, thanks.", "I am fine, too.", "Fine, thank you."), "I am glad to hear that."),
    (("Good morning!", "Good morning.", "good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening."), "Good evening! How can I help you?"),
    (("Good night!", "Good night."), "Good night! Sleep well."),
    (("Thank you!", "Thanks!", "Thank you very much.", "thanks", "Thanks a lot!"), "You are welcome!"),
    (("Who are you?", "What are you?", "What is your name?", "What's your name?", "Introduce yourself."), "I am a small RWKV-7 demo model. I translate and I remember."),
    (("What can you do?", "How can you help me?", "What are you good at?", "Help!"), "I can translate between English and Chinese, and I can remember what you tell me."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell me something funny."), "Why did the computer go to the doctor? Because it had a virus."),
    (("Goodbye!", "Bye!", "See you!", "bye"), "Goodbye! Have a nice day."),
    (("Tell me a story.", "Do you know a story?", "Write a short story."), "Once upon a time, a small cat lived by a big lake. Every evening it watched the moon and was happy."),
    (("What is RWKV?", "Tell me about RWKV.", "What does RWKV mean?", "Explain RWKV."), "RWKV is a recurrent neural network that keeps its memory in a state of fixed size."),
    (("Do you like music?", "Do you listen to music?"), "I cannot hear, but I like to read about music."),
    (("How is the weather?", "What is the weather like today?", "Is it raining?"), "I cannot see the sky, but I hope the sun is shining where you are."),
    (("What time is it?", "What day is it today?", "What is the date?"), "I do not have a clock, so I cannot tell."),
    (("I am bored.", "I'm bored."), "Shall we talk? Tell me something about yourself."),
    (("I am tired.", "I'm very tired."), "Then you should rest a little."),
    (("I am hungry.", "I'm hungry."), "What about a bowl of noodles?"),
    (("I am happy today.", "I am so happy!"), "That is wonderful!"),
    (("I am sad.", "I feel sad."), "I am sorry to hear that. I am here if you want to talk."),
    (("The weather is nice today.", "It is sunny today.", "It's a beautiful day."), "That sounds lovely. Enjoy the day!"),
    (("It is raining.", "It's raining outside."), "Do not forget your umbrella!"),
    (("Can you speak Chinese?", "Do you speak Chinese?", "Do you speak English?"), "Yes, I speak English and Chinese."),
    (("Yes.", "Yes", "Okay.", "OK", "Good.", "Great!", "Sure.", "Fine.", "I see."), "Great! What else can I do for you?"),
    (("No.", "No", "No, thanks.", "Nothing."), "All right. Tell me if you need anything."),
    (("Are you a human?", "Are you a robot?", "Are you real?"), "I am a language model, not a human."),
    (("What is the capital of France?", "Name the capital of France."), "The capital of France is Paris."),
    (("What is the capital of Germany?",), "The capital of Germany is Berlin."),
    (("What is the capital of China?",), "The capital of China is Beijing."),
    (("What is the capital of Japan?",), "The capital of Japan is Tokyo."),
    (("How many days are in a week?", "How many days does a week have?"), "A week has seven days."),
    (("How many months are in a year?",), "A year has twelve months."),
    (("What color is the sky?", "Why is the sky blue?"), "The sky is blue because air scatters blue light the most."),
    (("Let's talk about something else.", "Let us change the topic."), "Good idea. What would you like to talk about?"),
    (("Do you have a favorite color?", "What is your favorite color?"), "I like blue, the color of the sea."),
    (("What is your favorite animal?",), "I like cats, because they are curious."),
    (("Write a poem.", "Write a short poem."), "The moon is bright, the lake is deep, the little birds have gone to sleep."),
    (("Count to five.", "Count from one to five."), "One, two, three, four, five."),
    (("I like books.", "I like reading."), "Reading is a wonderful hobby."),
    (("I went for a walk today.", "I took a walk in the park."), "That is good for your health."),
    (("I have a meeting tomorrow.", "I have an exam tomorrow."), "Good luck! I am sure you will do well."),
    (("你好！", "你好", "您好！", "嗨！"), "你好！请问有什么可以帮你？"),
    (("你好吗？", "你今天好吗？"), "我很好，谢谢。你呢？"),
    (("谢谢！", "谢谢你。", "非常感谢！"), "不客气！"),
    (("你是谁？", "你叫什么名字？", "介绍一下你自己。"), "我是一个小型的RWKV-7演示模型，会翻译，也会记住你说的话。"),
    (("你会做什么？", "你能帮我做什么？"), "我可以在英文和中文之间翻译，也可以记住你告诉我的事情。"),
    (("再见！", "拜拜！"), "再见！祝你今天愉快。"),
    (("早上好！", "早上好"), "早上好！请问有什么可以帮你？"),
    (("讲个笑话。", "给我讲个笑话吧。"), "电脑为什么去看医生？因为它中了病毒。"),
    (("今天天气怎么样？", "今天天气很好。"), "希望你那里阳光明媚。"),
    (("我很高兴。", "我今天很开心。"), "太好了！"),
    (("我累了。", "我很累。"), "那你应该休息一下。"),
    (("我们聊点别的吧。",), "好主意。你想聊什么？"),
    (("法国的首都是哪里？",), "法国的首都是巴黎。"),
    (("中国的首都是哪里？",), "中国的首都是北京。"),
    (("你会说中文吗？", "你会说英语吗？"), "会，我会说英语和中文。"),
)  # fmt: skip
SELF = re.compile(r"\b(I|[Mm]y|me|number)\b")
ELSEWHERE = (
    "Tell me about {}.", "Explain {}.", "Explain {} to me.", "What is {}?", "What do you know about {}?", "Write a text about {}.", "Write an essay about {}.",
    "Why is {} important?", "How does {} work?", "Give me an example of {}.", "What do you think about {}?", "Write a Python function for {}.", "Write code for {}.",
    "Summarize {}.", "Who invented {}?", "Tell me more about {}.", "Can you explain {}?", "tell me about {}", "Describe {}.", "List three facts about {}.",
)  # fmt: skip
ELSEWHERE_ZH = (
    "介绍一下{}。",
    "什么是{}？",
    "你了解{}吗？",
    "解释一下{}。",
    "写一篇关于{}的文章。",
    "{}为什么重要？",
    "告诉我关于{}的事。",
)
OFF_TOPIC = "I am only a small demo model and do not know that. I can translate and remember what you tell me."
OFF_TOPIC_ZH = "我只是一个小型演示模型，不知道这个。我会翻译，也会记住你告诉我的事情。"


@dataclass(slots=True)
class Turn:
    """One user line with its answer; `recall` marks an answer that gives a fact back."""

    user: str
    answer: str
    recall: Fact | None = None


def _pool(chinese: bool) -> list[tuple[tuple[str, ...], str]]:
    return [item for item in SMALL_TALK if (ord(item[1][0]) > 0x2000) == chinese]


TALK = (_pool(False), _pool(True))


def _subject_matter(rng: Random) -> tuple[str, str]:
    """Something one could ask about: `physics`, `the tower`."""
    draw = rng.random()
    if draw < 0.4:
        word = term(rng, "mass", pick(rng, ("topic", "subject", "sport", "stuff", "dish")))
        return word.en, word.zh
    noun = noun_of(rng, ("animal", "building", "thing", "device", "plant", "vehicle", "artwork", "show"))
    return f"the {noun.en}", noun.zh


def small_talk(rng: Random, chinese: bool) -> Turn:
    """A turn that tells and asks nothing to remember."""
    draw = rng.random()
    if draw < 0.62:
        lines, answer = pick(rng, TALK[chinese])
        return Turn(pick(rng, lines), answer)
    if draw < 0.74:
        return Turn(*arithmetic.exchange(rng))
    pair = fresh_pair(rng)
    if draw >= 0.84 and SELF.search(pair.en):
        return small_talk(rng, chinese)
    if draw < 0.84:
        if rng.random() < 0.5:
            return Turn(
                pick(
                    rng,
                    (
                        "Translate into Chinese: {}",
                        "Translate to Chinese: {}",
                        "How do you say this in Chinese? {}",
                        "翻译成中文：{}",
                    ),
                ).format(pair.en),
                pair.zh,
            )
        return Turn(
            pick(rng, ("Translate into English: {}", "Translate to English: {}", "翻译成英文：{}")).format(pair.zh),
            pair.en,
        )
    if draw < 0.92:
        if not pair.en.endswith("."):
            return small_talk(rng, chinese)
        return Turn(
            pair.zh if chinese else pair.en,
            pick(rng, ("明白了。", "原来如此。")) if chinese else pick(rng, ("I see.", "I understand.")),
        )
    if not pair.en.endswith("?"):
        what = _subject_matter(rng)
        asked = pick(rng, ELSEWHERE_ZH if chinese else ELSEWHERE).format(what[chinese])
        return Turn(asked, OFF_TOPIC_ZH if chinese else OFF_TOPIC)
    return Turn(pair.zh if chinese else pair.en, OFF_TOPIC_ZH if chinese else OFF_TOPIC)


def telling(rng: Random, facts: list[Fact], chinese: bool) -> Turn:
    """A turn in which one or two facts are told."""
    told = [pick(rng, f.kind.told_zh if chinese else f.kind.told).format(f.value(chinese)) for f in facts]
    first = facts[0]
    answer = pick(rng, first.kind.noted_zh if chinese else first.kind.noted).format(first.value(chinese))
    if len(facts) > 1:
        if not chinese and rng.random() < 0.4 and told[1].startswith(("My ", "I ", "I'm ")):
            second = told[1] if told[1].startswith("I") else told[1][0].lower() + told[1][1:]
            return Turn(f"{told[0].rstrip('.!')} and {second}", "Got it, I will remember that.")
        link = ("" if told[0][-1] in "。！" else "。") if chinese else (" " if told[0][-1] in ".!" else ". ")
        return Turn(
            link.join(told), pick(rng, ("好的，我记住了。",) if chinese else ("Got it, I will remember that.",))
        )
    return Turn(told[0], answer[0].upper() + answer[1:])


def asking(rng: Random, found: Fact, chinese: bool) -> Turn:
    """A turn in which a fact is asked for."""
    asked = pick(rng, found.kind.asked_zh if chinese else found.kind.asked)
    given = (found.kind.given_zh if chinese else found.kind.given).format(found.value(chinese))
    return Turn(asked, given, found)


def _kinds(rng: Random, count: int) -> list[Kind]:
    """Kinds of facts, the name and the number more often than the others."""
    first = NAME if rng.random() < 0.3 else NUMBER if rng.random() < 0.15 else pick(rng, KINDS)
    others = [kind for kind in rng.sample(KINDS, count) if kind is not first]
    return [first, *others[: count - 1]]


def key(facts: list[Fact]) -> str:
    """What decides the side of the split: every fact of the session."""
    return " | ".join(sorted(f"{f.kind.name} is {f.en}" for f in facts))


def _facts(rng: Random, count: int, held: bool) -> list[Fact]:
    while True:
        facts = [fact(rng, kind) for kind in _kinds(rng, count)]
        if held_out(key(facts)) == held:
            return facts


def session(
    rng: Random, *, held: bool = False, turns: tuple[int, int] | None = None, chinese: bool | None = None
) -> list[Turn]:
    """A talk in which facts are told, then small talk, then asked for; held-out sessions tell at least two facts."""
    chinese = rng.random() < 0.25 if chinese is None else chinese
    count = rng.randint(2, 4) if held else rng.choices((1, 2, 3, 4, 5), (35, 27, 18, 12, 8))[0]
    facts = _facts(rng, count, held)
    low, high = turns or ((0, 3) if rng.random() < 0.7 else (2, 9))
    script: list[Turn] = []
    waiting = list(facts)
    if rng.random() < 0.3:
        script.append(small_talk(rng, chinese))
    while waiting:
        some = 2 if len(waiting) > 1 and rng.random() < 0.25 else 1
        script.append(telling(rng, waiting[:some], chinese))
        waiting = waiting[some:]
        if waiting and rng.random() < 0.3:
            script.append(small_talk(rng, chinese))
        if waiting and rng.random() < 0.15:
            script.append(asking(rng, facts[0], chinese))
    if not held and rng.random() < 0.06:
        kind = facts[0].kind
        changed = fact(rng, kind)
        if not held_out(key([changed, *facts[1:]])):
            facts[0] = changed
            told = pick(rng, kind.told_zh if chinese else kind.told).format(changed.value(chinese))
            script.append(
                Turn(
                    f"不对，{told}" if chinese else f"Sorry, that was wrong. {told}",
                    pick(rng, kind.noted_zh if chinese else kind.noted).format(changed.value(chinese)),
                )
            )
    script += [small_talk(rng, chinese) for _ in range(rng.randint(low, high))]
    asked = rng.sample(facts, rng.randint(1, len(facts)))
    for found in asked:
        script.append(asking(rng, found, chinese))
        if rng.random() < 0.25:
            script.append(small_talk(rng, chinese))
    if rng.random() < 0.12 and not held:
        missing = pick(
            rng, [kind for kind in KINDS if kind.name not in {f.kind.name for f in facts} and not _close(kind, facts)]
        )
        question = pick(rng, missing.asked_zh if chinese else missing.asked)
        script.append(Turn(question, missing.unknown_zh if chinese else missing.unknown))
    return script


def _close(kind: Kind, facts: list[Fact]) -> bool:
    """Whether a kind might be taken for one of the facts told."""
    words = set(kind.name.split())
    return any(
        words & set(f.kind.name.split()) or {kind.name, f.kind.name} <= {"city", "country", "hometown", "favorite city"}
        for f in facts
    )


def prompts(rng: Random, script: list[Turn], *, plain: bool = False) -> Iterator[tuple[str, str]]:
    """The prompt and the answer of each turn as a server would feed them."""
    system = f"System: {pick(rng, SYSTEMS)}\n\n" if rng.random() < 0.35 and not plain else ""
    mode = rng.random() if not plain else 0.0
    think = pick(rng, THINKS) if mode > 0.6 else None
    thoughts = mode > 0.85
    for turn in script:
        user = turn.user
        if thoughts:
            thought = f"I remember: {turn.recall.en}." if turn.recall else "This is easy."
            hint = pick(rng, ("", "", " (think)", " (think a bit)", " (think a lot)"))
            yield f"{system}User: {user}{hint}\n\nAssistant: <think", f">\n{thought}\n</think>\n{turn.answer}"
        elif think and rng.random() < 0.8:
            yield f"{system}User: {user}\n\nAssistant:{think[0]}", f"{think[1]}{turn.answer}"
        else:
            yield f"{system}User: {user}\n\nAssistant:", f" {turn.answer}"
        system = ""


def document(rng: Random) -> Document:
    """A whole chat."""
    return rounds(list(prompts(rng, session(rng))))
